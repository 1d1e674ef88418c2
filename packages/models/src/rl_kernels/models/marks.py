"""Marks on the modules of an invariant model: a module that is added to a marked module is swapped too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

MARKS = "_invariant_marks"
"""Attribute of a marked module."""


class Mark(NamedTuple):
    """A call of ``invariant`` that swapped a module."""

    name: str
    """Name of the module in the model that was passed to ``invariant``."""
    strict: bool
    handle: weakref.ref[Any] | None
    """The ``Invariance``; None in a deep copy, which no handle undoes."""
    config_classes: set[type]
    """Classes of the configs whose attention is swapped in the model."""


class Marks(list[Mark]):
    """The marks of a module; a deep copy is marked too, a pickle is not."""

    def __deepcopy__(self, memo: Any) -> Marks:
        return Marks(mark._replace(handle=None) for mark in self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tuple, ()


def marks_of(module: nn.Module) -> list[Mark]:
    """Return the marks of a module."""
    return list(vars(module).get(MARKS, ()))


def mark(module: nn.Module, new: Mark) -> Callable[[], None]:
    """Mark a module; return a function that removes the mark. A handle takes over the marks of a copy."""
    remaining = [existing for existing in marks_of(module) if existing.handle is not None]
    vars(module)[MARKS] = Marks([*remaining, new])

    def remove() -> None:
        remaining = [existing for existing in marks_of(module) if existing != new]
        vars(module)[MARKS] = Marks(remaining)
        if not remaining:
            del vars(module)[MARKS]

    return remove
