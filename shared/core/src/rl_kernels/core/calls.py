"""What is checked, chosen and prepared for one call serves all calls of its kind.

A kind is what may decide how a call runs: of a tensor its type, shape, strides, dtype, device, alignment and lazy
negation, of any other argument its type and value. The values of tensors are not part of it, not even of small ones on
the CPU. Two things are remembered under it: what the public function found out (``dispatch.remembered``), and the
launches of a backend (``prepared``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rl_kernels.core.layout import ALLOCATED

T = TypeVar("T")
Launches = Callable[..., Any]
"""The launches of a raw op, prepared for one kind of arguments; called with arguments of that kind."""
SIZE = 4096
"""Number of kinds at which a memory is cleared."""
OWN = frozenset({torch.Tensor, torch.nn.Parameter})
NUMBERS = frozenset({int, float, bool, str, torch.dtype})
_memories: list[Memory[Any]] = []


class Memory(Generic[T]):
    """What is remembered of one function, by kinds of its arguments."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...] | None, T] = {}
        self.get = self._kinds.get
        _memories.append(self)

    def add(self, kind: tuple[object, ...], value: T) -> None:
        """Remember a value; if there are too many, forget the others."""
        if len(self._kinds) >= SIZE:
            self._kinds.clear()
        self._kinds[kind] = value

    def clear(self) -> None:
        """Forget all values."""
        self._kinds.clear()


def forget() -> None:
    """Clear every memory; needed when backends are replaced."""
    for memory in _memories:
        memory.clear()


def kind_of(args: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return the kind of arguments, or None if they have none.

    A sparse tensor has no strides, and one that a transform wraps no address. To look up a kind may raise
    ``TypeError``: an argument without a hash, such as a symbolic size.
    """
    try:
        return tuple(
            [
                None
                if x is None
                # An index in place of a device, whose hash takes longer.
                else (kind, x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(), x.data_ptr() % ALLOCATED)
                if (kind := type(x)) in OWN and (x.is_cuda or x.is_cpu)
                # The type is part of it, because True == 1.
                else (kind, x)
                if kind in NUMBERS
                else _kind_of_other(x)
                for x in args
            ]
        )
    except RuntimeError:
        return None


def _kind_of_other(x: Any) -> tuple[object, ...]:
    if isinstance(x, torch.Tensor):
        alignment = 0 if isinstance(x, FakeTensor) else x.data_ptr() % ALLOCATED
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), alignment
    return type(x), tuple(x) if isinstance(x, list) else x


class Ready(NamedTuple):
    """What a public function found out about calls of one kind.

    Attributes:
        backend: name of the chosen backend.
        launches: those of the raw op that it calls; None where something observes ops, or wraps tensors.
    """

    backend: str
    launches: Launches | None = None


class prepared:
    """Decorate a raw op of a backend that returns the launches for its arguments, so that they are prepared once.

    The decorated function runs the op, as any other function of a backend does. Launches may rely on the kind of their
    arguments alone. They read the values of tensors in each call, and call no op that autocast changes.
    """

    def __init__(self, prepare: Callable[..., Launches]) -> None:
        self.prepare = prepare
        functools.update_wrapper(self, prepare)

    def __call__(self, *args: Any) -> Any:
        """Prepare the launches, and run them."""
        return self.prepare(*args)(*args)
