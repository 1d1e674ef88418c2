"""Load a user's implementation, ``MODULE:CALLABLE`` or ``path/to/file.py:callable``, and list its arguments."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


class Unusable(ValueError):
    """A module cannot be imported, or holds no such callable; the message says which."""


@dataclass(frozen=True)
class Loaded:
    """A callable, and the keyword arguments that its signature names; None if it has no signature."""

    function: Callable[..., Any]
    name: str
    takes: frozenset[str] | None
    needs: tuple[str, ...] = ()
    """The arguments without a default."""
    takes_any: bool = False
    """Whether it takes ``**kwargs``."""

    def described(self) -> dict[str, Any]:
        """Return its name and what it takes, as plain values."""
        takes = None if self.takes is None else sorted(self.takes)
        return {"name": self.name, "takes": takes, "needs": list(self.needs), "takes_any": self.takes_any}


def load(target: str) -> Loaded:
    """Import a callable, an ``nn.Module`` or another object with ``forward``.

    Raises:
        Unusable: the module cannot be imported, or holds no such callable.
    """
    source, _, path = target.rpartition(":")
    try:
        module = _import_file(Path(source).expanduser()) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise Unusable(f"cannot import {source}: {type(error).__name__}: {error}") from error
    found: Any = module
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    # An instance has no name of its own.
    name = getattr(found, "__name__", path.rpartition(".")[2])
    forward = getattr(found, "forward", None)
    if not callable(found):
        found = forward
    if not callable(found):
        raise Unusable(f"{source} has no callable {path!r}")
    # The arguments of an nn.Module are those of its forward: __call__ takes anything and passes it on.
    return Loaded(found, name, *_parameters(forward if callable(forward) else found))


def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str] | None, tuple[str, ...], bool]:
    """Return the keywords that a function names, those without a default, and whether it takes others.

    It may ignore what it takes by ``**kwargs``.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, (), True
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes = frozenset(each.name for each in named if each.kind is not each.POSITIONAL_ONLY)
    needs = tuple(each.name for each in named if each.default is each.empty)
    return takes, needs, any(each.kind is each.VAR_KEYWORD for each in parameters)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError("no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look the module up by name. Do not replace another module of that name.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
