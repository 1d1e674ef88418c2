"""Arguments that group others: spread for cases, grouped again for the function."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from rl_kernels.core.testing.grouped import flat, members


@dataclass(frozen=True, kw_only=True)
class Shape:
    width: int = 1
    depth: float = 2.0

    def __post_init__(self) -> None:
        if type(self.width) is not int:
            raise TypeError("width: expected an integer")


class More(NamedTuple):
    weight: torch.Tensor | None = None
    length: int | None = None


GROUPS = {"shape": Shape, "more": More}


def called(x: int, *, shape: Shape | None = None, more: More | None = None, width: int | None = None) -> tuple:
    return x, shape, more, width


def test_members_become_arguments_with_their_defaults() -> None:
    parameters = inspect.signature(flat(called, GROUPS)).parameters
    assert list(parameters) == ["x", "width", "depth", "weight", "length"]
    assert [parameters[name].default for name in ("width", "depth", "length")] == [1, 2.0, None]
    assert members(More) == {"weight": None, "length": None}
    # A function without groups is itself.
    assert flat(len, {}) is len
    assert flat(pytest.fail, GROUPS) is pytest.fail


def test_members_are_grouped_where_one_needs_its_group() -> None:
    call, weight = flat(called, GROUPS), torch.ones(2)
    _, shape, more, width = call(1, width=3, depth=1.0, weight=weight)
    assert (shape, width) == (Shape(width=3, depth=1.0), None)
    assert more.weight is weight
    assert more.length is None
    assert call(x=1, width=3) == (1, None, None, 3)
    assert call(1) == (1, None, None, None)
    # Equal values of other types are not taken for each other.
    assert call(1, width=1, depth=3.0)[1] == Shape(depth=3.0)
    with pytest.raises(TypeError, match="width: expected an integer"):
        call(1, width=True, depth=3.0)
