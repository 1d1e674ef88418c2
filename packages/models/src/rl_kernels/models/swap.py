"""Swaps that can be undone in any order: a swap counts its holders, and the last one that releases it undoes it."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

SWAPPED = "_rl_kernels_swapped"
"""Attribute of a swapped class: the original class."""
HOOK, WITHIN_HOOK = "_hf_hook", "_old_forward"
"""Attributes that accelerate sets on a module: its hook, and the forward that the hook calls."""
Undo = Callable[[Any], None]
"""Takes the object and undoes its swap; it must not hold a reference to the object."""


class _HeldSwap(NamedTuple):
    target: weakref.ref[Any]
    undo: Undo
    holders: int


_lock = threading.RLock()
_held: dict[tuple[int, str], _HeldSwap] = {}
"""(id, aspect) -> the swap of an object, until the object is freed; by id, because configs have no hash."""


def hold(target: Any, aspect: str, swap: Callable[[Any], Undo]) -> Callable[[], None]:
    """Swap an aspect of an object, such as its class, unless it is swapped; return a function that releases it."""
    key = id(target), aspect
    with _lock:
        if key in _held:
            _held[key] = _held[key]._replace(holders=_held[key].holders + 1)
        else:
            _held[key] = _HeldSwap(weakref.ref(target, lambda _: _held.pop(key, None)), swap(target), 1)
    return lambda: _release(target, aspect)


def _release(target: Any, aspect: str) -> None:
    key = id(target), aspect
    with _lock:
        current = _held[key]
        if current.holders > 1:
            _held[key] = current._replace(holders=current.holders - 1)
            return
        del _held[key]
        current.undo(target)


def held(target: Any, aspect: str) -> bool:
    """Say whether an aspect of an object is swapped."""
    return (id(target), aspect) in _held


def forget_graphs() -> None:
    """Drop compiled graphs: before 2.13, PyTorch does not notice that the class of a module has changed."""
    if "torch._dynamo" in sys.modules and torch.__version__ < "2.13":
        torch.compiler.reset()


def original_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or its original class if it is swapped."""
    # Read from the class: wrappers, such as PEFT's, also return attributes of the module inside.
    return getattr(type(module), SWAPPED, type(module))


def class_swap(subclass: type[nn.Module], original: type[nn.Module]) -> Callable[[nn.Module], Undo]:
    """Return a function that swaps a module's class for a subclass; the object and its state stay as they are."""

    def swap(module: nn.Module) -> Undo:
        _set_class(module, subclass)
        return lambda module: _restore_class(module, subclass, original)

    return swap


def shallow_copy(module: nn.Module) -> Any:
    """Return a copy that shares all attributes; ``copy.copy`` makes a new module of a class that FSDP2 made."""
    copied = object.__new__(type(module))
    copied.__dict__.update(vars(module))
    return copied


def calls_own_forward(module: nn.Module) -> bool:
    """Say whether a call of a module runs the forward of its class, maybe within a hook of accelerate."""
    own = vars(module)
    forward = own.get("forward")
    if HOOK in own and getattr(getattr(forward, "func", None), "__module__", "") == "accelerate.hooks":
        forward = own.get(WITHIN_HOOK)
    return "forward" not in own or _is_own(forward, module)


def _is_own(value: Any, module: nn.Module) -> bool:
    is_bound = isinstance(value, MethodType) and value.__self__ is module
    return is_bound and value.__func__ is type(module).forward


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Set a module's class; its forward, where accelerate keeps it as an attribute, follows."""
    forwards = [name for name, value in vars(module).items() if _is_own(value, module)]
    module.__class__ = kind
    for name in forwards:
        vars(module)[name] = MethodType(kind.forward, module)


def _restore_class(module: nn.Module, subclass: type[nn.Module], original: type[nn.Module]) -> None:
    """Restore a module's class; a class that FSDP2 or a parametrization put on top stays."""
    current = type(module)
    if current is subclass:
        _set_class(module, original)
    elif subclass in current.__bases__:
        bases = tuple(original if base is subclass else base for base in current.__bases__)
        # transformers wraps the forward of each subclass of a layer; the new class gets a wrapper of its own.
        body = {
            name: value
            for name, value in vars(current).items()
            if name not in ("__dict__", "__weakref__") and getattr(value, "__wrapped__", None) is not subclass.forward
        }
        _set_class(module, type(current.__name__.replace(subclass.__name__, original.__name__), bases, body))
    elif subclass in current.__mro__:
        warnings.warn(f"model: a {current.__name__} stays swapped: its class was changed twice since", stacklevel=3)


@contextmanager
def replaced(model: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object, such as a method, for a ``with`` block."""
    own = {key: kept for key, kept in vars(model).items() if key == name}
    setattr(model, name, value)
    try:
        yield
    finally:
        delattr(model, name)
        for key, kept in own.items():
            setattr(model, key, kept)
