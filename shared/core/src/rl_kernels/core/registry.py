"""The installed operators, which announce themselves by entry points and are imported at first use."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from typing import Any

from rl_kernels.core.command import install_hint
from rl_kernels.core.operator import Operator

GROUP = "rl_kernels.operators"

PUBLISHED: dict[str, dict[str, Any]] = json.loads((files("rl_kernels.core") / "published.json").read_text("utf-8"))
"""The operators of this release, with distribution, aliases and functions, whether installed or not.

``tools/published.py`` writes the file.
"""


def published_operator(name: str) -> str | None:
    """Return the operator of this release that has this name, alias or function, or None."""
    for operator, published in PUBLISHED.items():
        if name in (operator, *published["aliases"], *published["functions"]):
            return operator
    return None


class UnknownOperator(LookupError):
    """No installed operator has that name."""


class KernelRegistry:
    """The installed operators. Reading their names imports none of them."""

    def __init__(self, found: dict[str, EntryPoint]) -> None:
        self._points = found
        self._loaded: dict[str, Operator] = {}

    def names(self) -> list[str]:
        """Return the registry names of the installed operators, sorted."""
        return sorted(self._points)

    def load(self, name: str) -> Operator:
        """Return an operator by name, by an alias, or by the name of another function of its package.

        Raises:
            UnknownOperator: no installed operator has that name; the message says what to install, or lists the
                installed operators.
        """
        if name in self._loaded:
            return self._loaded[name]
        operator = self._import(name) if name in self._points else self._by_alias(name)
        self._loaded[name] = operator
        return operator

    def get_op(self, name: str) -> Callable[..., Any]:
        """Return a public function by its name or an alias; raises as ``load`` does."""
        operator = self.load(name)
        return operator.function(name if name in operator.functions else "")

    def _import(self, name: str) -> Operator:
        operator = self._points[name].load()
        if not isinstance(operator, Operator) or operator.name != name:
            raise TypeError(f"entry point {name!r} of {GROUP} must give the Operator of that name, got {operator!r}")
        return operator

    def _by_alias(self, name: str) -> Operator:
        known = published_operator(name)
        if known in self._points:
            return self._import(known)
        if known is not None:
            hint = install_hint(PUBLISHED[known]["distribution"])
            raise UnknownOperator(f"operator {name!r} is not installed; {hint}")
        for operator in map(self._import, self._points):
            if name in (*operator.aliases, *operator.functions):
                return operator
        raise UnknownOperator(f"unknown operator {name!r}; installed: {', '.join(self.names()) or 'none'}")


def _discover() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        first = points.setdefault(point.name, point)
        if first.value != point.value:
            raise ImportError(f"operator {point.name!r} is announced twice: as {first.value} and as {point.value}")
    return points


# Searched once, at import: entry points cannot be read while torch.compile traces.
kernel_registry = KernelRegistry(_discover())
names = kernel_registry.names
load = kernel_registry.load
