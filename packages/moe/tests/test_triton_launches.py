"""The host side of the Triton backend without Triton: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonRecorder

sys.path.insert(0, str(Path(__file__).parent))
from experts_launches import STAND_INS, check, operands

BACKEND = "rl_kernels.moe.backends.triton"
MODULES = (*(f"rl_kernels.moe.triton_lib.{name}" for name in ("sorting", "launches", "grouped")), f"{BACKEND}.backend")
BUGS = (
    Bug("tiles of another height", "kit.cuts.gate_up.rows)", "kit.cuts.gate_up.columns)"),
    Bug("last columns left out", "tiles * ceil_div(double // 2, cut.columns)", "tiles * (double // 2 // cut.columns)"),
    Bug("last routes are not sorted", "ceil_div(routes, order.BLOCK", "(lambda x, y: x // y)(routes, order.BLOCK"),
    Bug("terms of the next expert", "k * b.stride(2) and not k % cut.inner", "k * b.stride(2)"),
    Bug("weights of routes left out", "of_down_bias(grad, weights,", "of_down_bias(grad, None,"),
    Bug("places of rows left out", "combine(y, ids, places, weights", "combine(y, ids, None, weights"),
    Bug("buffer's strides left out", "if buffer is None else buffer.stride()", "if True else buffer.stride()"),
)
Plant = Callable[[], AbstractContextManager[None]]


CALLS = (
    dict(tokens=1, width=64, inner=48, experts=8, slots=4),
    dict(tokens=1, width=64, inner=40, experts=3, slots=9),
    dict(tokens=1100, width=32, inner=40, experts=3, slots=2, layout="transposed", biases=True),
    dict(tokens=50, width=128, inner=64, experts=4, slots=3, layout="transposed", interleaved=True),
    dict(tokens=40, width=30, inner=9, experts=2, slots=1, biases=True, activation="gelu_tanh"),
    dict(tokens=300, width=64, inner=130, experts=2, slots=2, interleaved=True, activation="clamped_swiglu"),
    dict(tokens=33, width=40, inner=24, experts=4, slots=2, dtype=torch.float32, biases=True, arch="sm80"),
    dict(tokens=65, width=40, inner=64, experts=4, slots=2, arch="sm80", interleaved=True),
    dict(tokens=0, width=16, inner=8, experts=2, slots=2),
)


def check_all(plant: Plant = nullcontext) -> None:
    for call in CALLS:
        with TritonRecorder(STAND_INS, arch=call.get("arch", "sm90")).pretended(), plant(), poisoned_empty():
            check(f"{BACKEND}.backend", call)


def test_launches_match_the_shapes() -> None:
    check_all()


@pytest.mark.parametrize(("tokens", "first"), [(1, []), (2, ["place"])], ids=["one-token", "two-tokens"])
def test_few_routes_are_sorted_by_one_launch_or_none(tokens: int, first: list[str]) -> None:
    with TritonRecorder(STAND_INS).pretended() as recorder:
        backend = importlib.import_module(f"{BACKEND}.backend")
        _, tensors, biases, _ = operands(tokens, 64, 48, 128, 8)
        backend.forward(*tensors, *biases, None, "silu", False)
    assert [launch.name for launch in recorder.launches] == [*first, "gate_up", "product", "combine"]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_all(partial(planted, MODULES, bug))
