"""Swaps that can be undone in any order: who asks for one that is there holds it too, and the last one undoes it."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

SWAPPED = "_rl_kernels_swapped"
"""An attribute of classes that stand for others: the class that each stands for."""
Undo = Callable[[Any], None]
"""Takes the object and undoes its swap; it must not keep the object alive itself."""


class _Held(NamedTuple):
    target: weakref.ref[Any]
    undo: Undo
    holders: int


_lock = threading.RLock()
_held: dict[tuple[int, str], _Held] = {}
"""(id, what) -> the swap of an object; configs of transformers have no hash. It goes when the object does."""


def hold(target: Any, what: str, swap: Callable[[Any], Undo]) -> Callable[[], None]:
    """Swap ``what`` of an object, unless that is held already; return what lets go of it."""
    key = id(target), what
    with _lock:
        if key in _held:
            _held[key] = _held[key]._replace(holders=_held[key].holders + 1)
        else:
            _held[key] = _Held(weakref.ref(target, lambda _: _held.pop(key, None)), swap(target), 1)
    return lambda: _release(target, what)


def _release(target: Any, what: str) -> None:
    key = id(target), what
    with _lock:
        found = _held[key]
        if found.holders > 1:
            _held[key] = found._replace(holders=found.holders - 1)
            return
        del _held[key]
        found.undo(target)


def held(target: Any, what: str) -> bool:
    """Say whether a swap of an object is held."""
    return (id(target), what) in _held


def forget_graphs() -> None:
    """Drop what was compiled: before 2.13, PyTorch does not see that the class of a module has changed."""
    if "torch._dynamo" in sys.modules and torch.__version__ < "2.13":
        torch.compiler.reset()


def class_swap(other: type[nn.Module], original: type[nn.Module]) -> Callable[[nn.Module], Undo]:
    """Return the swap of a module's class for a subclass of it; the object and all it holds stay as they are."""

    def swap(module: nn.Module) -> Undo:
        module.__class__ = other
        return lambda module: _give_back(module, other, original)

    return swap


def _give_back(module: nn.Module, other: type[nn.Module], original: type[nn.Module]) -> None:
    """Take a class out of a module's; FSDP2 and parametrizations put one of their own before it, which stays."""
    found = type(module)
    if found is other:
        module.__class__ = original
    elif other in found.__bases__:
        bases = tuple(original if base is other else base for base in found.__bases__)
        body = {name: value for name, value in vars(found).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(found.__name__.replace(other.__name__, original.__name__), bases, body)
    elif other in found.__mro__:
        warnings.warn(f"model: a {found.__name__} stays swapped, its class was changed twice since", stacklevel=3)


@contextmanager
def replaced(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have a function in the place of a method of an object."""
    own = {key: value for key, value in vars(model).items() if key == name}
    setattr(model, name, function)
    try:
        yield
    finally:
        delattr(model, name)
        for key, value in own.items():
            setattr(model, key, value)
