"""The host side of the passes for gradients of ``cuda-sm90`` without a GPU; planted bugs show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.launches import Launch, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.gated_delta.backends.cuda_sm90 import passes
from rl_kernels.gated_delta.inputs import Inputs

MODULES = tuple(f"rl_kernels.gated_delta.backends.cuda_sm90.{name}" for name in ("prefill", "passes"))
SIZE, PROCESSORS = 128, 12
BUGS = (
    Bug("the output's pass", "plan.parts, replays=True)", "plan.parts)"),
    Bug("states for their gradients", "units, items, states, grad_state", "units, items, dstates, grad_state"),
    Bug("v for the gradient of the output", "for x in (v, grad))", "for x in (grad, v))"),
    Bug("the initial state left out", "(units, items, None, first,", "(units, items, None, None,"),
    Bug("sums for their exponentials", "[..., AT_SUMS:]", "[..., AT_SUMS - 4 * CHUNK : AT_SUMS]"),
    Bug("a gradient that TMA cannot read", "readable(grad, fits(grad))", "readable(grad, True)"),
    Bug("q for k", "(None, inverse, unit_q, unit_k)", "(None, inverse, unit_k, unit_q)"),
)
FAILURES = (AssertionError, RuntimeError, ValueError, IndexError, KeyError)
Plant = Callable[[], AbstractContextManager[None]]


class StandIns:
    """Fill each tensor with a number of its own, and check what is handed from one kernel to the next."""

    def __init__(self, v: torch.Tensor, grad: torch.Tensor, states: tuple[Any, Any, Any]) -> None:
        self.v, self.grad = v, grad
        self.first, self.last, self.initial = states
        self.seen: dict[str, torch.Tensor] = {}

    def prepare(self, launch: Launch) -> None:
        slots = launch["unit_q"].shape[0]
        assert launch["tail"] is launch["held_keys"] is launch["held_inverse"] is None
        launch["unit_q"].fill_(1)
        launch["unit_k"].fill_(2)
        launch["inverses"].fill_(3)
        numbers = torch.tensor([0.5] * 64 + [4.0] * 64).view(torch.uint8)
        launch["items"].view(slots, -1, 25088)[..., 24576:] = numbers
        self.seen = {name: launch[name] for name in ("units", "items")}

    def check(self, launch: Launch, described: Any, expected: torch.Tensor) -> None:
        """Require the same chunks, and rows of a tensor."""
        assert all(launch[name] is x for name, x in self.seen.items())
        assert (described.box, described.swizzle) == ((1, 64, 1, 64), 128)
        torch.testing.assert_close(described.tensor, expected, rtol=0, atol=0)
        assert launch["scale"] == 0.1

    def scan(self, launch: Launch) -> None:
        assert launch.constants["REPLAYS"] == 1
        self.check(launch, launch["v_map"], self.v)
        assert launch["initial"] is self.first
        assert launch["state"] is launch["out"] is launch["tail"] is None
        launch["states"].fill_(5)
        launch["residuals"].fill_(6)
        self.seen["states"] = launch["states"]

    def reverse(self, launch: Launch) -> None:
        self.check(launch, launch["grad_map"], self.grad)
        assert launch["last"] is self.last
        assert launch["initial"] is self.initial
        launch["dstates"].fill_(7)
        launch["kept"].fill_(8)
        launch["dv"].fill_(9)


def check(plant: Plant = nullcontext) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 70, 2, SIZE, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, 70, 4, SIZE, dtype=torch.bfloat16)
    grad = torch.randn(1 + v.numel(), dtype=torch.bfloat16)[1:].view(v.shape)
    g, beta = (torch.rand(1, 70, 4) for _ in range(2))
    states = tuple(torch.randn(1, 4, SIZE, SIZE) for _ in range(3))
    inputs = Inputs(q, k, v, -g, beta, states[0], None, None, 0.1, True)
    stand_ins = StandIns(v, grad, states)
    recorder = Recorder(
        {name: getattr(stand_ins, name) for name in ("prepare", "scan", "reverse")}, processors=PROCESSORS
    )
    with plant(), recorder.watching(*MODULES), poisoned_empty():
        dv = torch.empty_like(v)
        passed = passes.Passes(inputs).run(inputs, grad, states[1], dv, states[2])
    shapes = [(2, 2, 64, SIZE)] * 2 + [(2, 4, 64), (2, 4, 64, 64)] + [(2, 4, SIZE, SIZE)] * 2
    assert [x.shape for x in passed] == [*shapes, (2, 4, 64, SIZE), (2, 4, passes.KEPT)]
    for x, value in zip((*passed, dv), (1, 2, 4, 3, 5, 7, 6, 8, 9), strict=True):
        assert bool((x == value).all())
    assert passed.sums.dtype == passed.inverse.dtype == passed.kept.dtype == torch.float32


def test_kernels_pass_on_their_tensors() -> None:
    check()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        check(partial(planted, MODULES, bug))
