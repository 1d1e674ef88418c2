"""The subclasses that swapped modules get: they can be copied and pickled, and end with the swap."""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from rl_kernels.models.swap import SWAPPED

_subclasses: dict[tuple[Any, ...], type[nn.Module]] = {}


def subclass(
    base: type[nn.Module],
    key: tuple[Any, ...],
    forward: Callable[..., Any] | None,
    original: type[nn.Module] | None = None,
    bases: tuple[type[nn.Module], ...] = (),
    name: str | None = None,
) -> type[nn.Module]:
    """Return the subclass with this forward, or the forward of ``bases``; cached by key, for torch.compile's guards.

    ``name`` is for classes that others, such as sharding plans, look up by their names.

    A deep copy keeps the class. A pickle has the original class, so that it can be read without this package.
    """
    cache_key = (base, *key)
    if cache_key not in _subclasses:
        body = {
            **({} if forward is None else {"forward": _while_swapped(forward)}),
            SWAPPED: original or base,
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            "__copy__": _copy,
            "__deepcopy__": _deep_copy,
            "__reduce_ex__": _reduce_ex,
        }
        _subclasses[cache_key] = type(name or f"RowWise{base.__name__}", bases or (base,), body)
    return _subclasses[cache_key]


def _while_swapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that calls the class's own forward once the swap is undone.

    Code that replaced a module's forward in the meantime may still call this one, bound to the module.
    """

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        return forward(self, *args, **kwargs) if hasattr(kind, SWAPPED) else kind.forward(self, *args, **kwargs)

    return run


def _copy(self: nn.Module) -> nn.Module:
    copied = object.__new__(type(self))
    copied.__dict__.update(self.__dict__)
    return copied


def _deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copied = object.__new__(type(self))
    memo[id(self)] = copied
    copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return copied


def _reduce_ex(self: Any, protocol: int) -> tuple[Any, ...]:
    # The form of protocols 0 and 1: unlike protocol 2, it may name another class than the object's.
    return copyreg._reconstructor, (getattr(self, SWAPPED), object, None), self.__dict__  # type: ignore[attr-defined]
