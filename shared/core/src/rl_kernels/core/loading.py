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
    loaded: Any = module
    for attribute in path.split("."):
        loaded = getattr(loaded, attribute, None)
    # An instance has no name of its own.
    name = getattr(loaded, "__name__", path.rpartition(".")[2])
    forward = getattr(loaded, "forward", None)
    if not callable(loaded):
        loaded = forward
    if not callable(loaded):
        raise Unusable(f"{source} has no callable {path!r}")
    # An nn.Module takes the arguments of its forward: __call__ takes anything and passes it on.
    return Loaded(loaded, name, *_parameters(forward if callable(forward) else loaded))


def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str] | None, tuple[str, ...], bool]:
    """Return the keywords that a function names, the keywords without a default, and whether it takes any other.

    A function with ``**kwargs`` may ignore other keywords.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, (), True
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    takes = frozenset(parameter.name for parameter in named if parameter.kind is not parameter.POSITIONAL_ONLY)
    needs = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
    return takes, needs, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


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
