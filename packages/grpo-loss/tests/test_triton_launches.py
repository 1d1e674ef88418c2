"""Launches of the Triton backend, recorded without Triton: they follow from the shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from rl_kernels.core.testing.host_tests import TritonHost
from rl_kernels.core.testing.planted import Bug
from rl_kernels.core.testing.triton_launches import TritonRecorder
from rl_kernels.grpo_loss.call import Formula, LossCall, Numbers
from rl_kernels.grpo_loss.outputs import METRICS

SEGMENT, LANES = 4096, 256
"""Tokens of a segment, and most lanes: part of the order of the sums."""
NUMBERS = Numbers(clip_low=0.1, clip_high=0.3, beta=0.25, eps=1e-3)
OTHERS = Numbers(clip_low=0.2, clip_high=0.4, beta=0.5, eps=1e-2)
"""Numbers of a later call of the same kind: their values are not part of it."""
ESTIMATOR = "population,max,keep"


class Case(NamedTuple):
    """A call: groups of rewards, or advantages of ``scores``; the layout of operands."""

    shape: tuple[int, int]
    sizes: tuple[int, ...] = ()
    scores: str = ""
    layout: str = "row"
    old: bool = True
    ref: bool = True
    spread: bool = False
    plan: Formula = Formula()
    metrics: bool = False
    divisor: bool = False
    dtype: torch.dtype = torch.float32


def boundaries_of(sizes: tuple[int, ...]) -> torch.Tensor | None:
    """Return the offsets of groups of different sizes."""
    offsets = torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)])
    return None if len(set(sizes)) == 1 else offsets


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "column":
        return x.t().contiguous().t()
    return torch.cat((x, x[:, :1]), 1)[:, : x.shape[1]] if layout == "pitch" else x


def drawn(case: Case) -> LossCall:
    """Return the arguments of a raw loss op."""
    batch, length = case.shape
    current, old, ref = (laid_out(-torch.rand(batch, length).to(case.dtype), case.layout) for _ in range(3))
    per_sequence = torch.rand(2 * batch)[::2] if case.spread else torch.rand(batch)
    boundaries = boundaries_of(case.sizes) if case.sizes else None
    samples = case.sizes[0] if case.sizes and boundaries is None else 0
    advantages = {
        "": None,
        "sequences": per_sequence,
        "tokens": laid_out(torch.rand(batch, length), case.layout),
        "expanded": torch.rand(batch).as_strided((batch, length), (1, 0)),
    }[case.scores]
    mask = laid_out(torch.rand(batch, length) < 0.7, case.layout)
    return LossCall(
        *(current, old if case.old else None, ref if case.ref else None),
        *(per_sequence if case.sizes else None, boundaries, samples, advantages, mask),
        *(None, None, torch.ones(()) if case.divisor else None, None, length),
        *(torch.tensor(NUMBERS, dtype=torch.float64), case.plan.text, ESTIMATOR, case.metrics),
    )


def power(x: int) -> bool:
    return x > 0 and x & (x - 1) == 0


def check_groups(launch: Any, lanes: int, sizes: tuple[int, ...]) -> None:
    """Lanes are a power of two up to 256; one step is enough only if no group has more rewards than that."""
    assert power(lanes)
    assert lanes <= LANES
    assert not launch["ONE_STEP"] or max(sizes) <= lanes
    # Fewer lanes than rewards would change the order of their sum.
    assert lanes >= min(max(sizes), LANES)
    boundaries = boundaries_of(sizes)
    assert launch["groups"] == (sizes[0] if boundaries is None else len(sizes))
    assert launch["boundaries"] is boundaries or torch.equal(launch["boundaries"], boundaries)


def check_terms(launch: Any, case: Case, call: LossCall, slope: bool) -> None:
    """Rows of what a token has lie in one piece; their pitch is that of the tensor."""
    batch, length = case.shape
    scores = call.advantages if call.rewards is None else call.rewards
    operands = {"current": call.current_logps, "old": call.old_logps, "ref": call.ref_logps, "mask": call.mask}
    for name, expected in (operands | {"scores": scores}).items():
        value, pitch = launch[name], launch[f"{name.removesuffix('s')}_row"]
        assert (value is None) == (expected is None), name
        assert pitch == (0 if value is None else value.stride(0)), name
        if value is not None and value.ndim == 2:
            assert torch.equal(value, expected), name
            assert value.stride(1) == 1 or length == 1, name
        elif value is not None:
            assert torch.equal(value, expected if expected.ndim == 1 else expected[:, 0]), name
    shape = max(-(-length // SEGMENT), 1), 3 + (len(METRICS) if case.metrics else 0), batch
    assert (launch["sums"].shape, launch["sums"].dtype) == (shape, torch.float32)
    assert launch["SEGMENT"] == SEGMENT
    assert power(launch["LANES"])
    assert launch.options["num_warps"] * 1024 >= launch["LANES"] >= min(length, 128)
    assert (launch["slope"] is not None) == slope
    if slope:
        assert launch["slope"].is_contiguous()
        assert (launch["slope"].shape, launch["slope"].dtype) == (case.shape, torch.float32)
    low, high, beta, eps = call.numbers[:4].tolist()
    assert [launch[name] for name in ("low", "high", "beta", "eps")] == [1 - low, 1 + high, beta, eps]
    assert launch["PER_TOKEN"] == (case.scores == "tokens")
    if case.sizes:
        check_groups(launch, launch["GROUP_LANES"], case.sizes)
    else:
        assert launch["GROUP_LANES"] == 0


def check_plan(launch: Any, last: Any, plan: Formula, length: int) -> None:
    """Check that every choice of the plan reaches the kernel."""
    names = ("KIND", "BOUNDS", "MODE", "KL")
    assert [launch[name] for name in names] == [plan.kind, plan.bounds, plan.rollout, plan.kl]
    assert (launch["SEQ"], launch["CORRECTED"]) == (plan.level == "sequence", plan.kl_correction == "corrected")
    assert launch["WHOLE"] == (plan.level == "sequence" and length <= launch["LANES"])
    assert plan.level == "sequence" or launch["LANES"] <= LANES
    assert launch["MEAN_SEQ"] == last["MEAN_SEQ"] == (plan.mean == "sequences")
    assert last["QUANTITIES"] == launch["sums"].shape[1]


def check_loss(launches: list[Any], case: Case, call: LossCall, slope: bool) -> None:
    (batch, length), last = case.shape, launches[-1]
    assert [launch.name for launch in launches] == ["terms", "reduce"]
    segments = max(-(-length // SEGMENT), 1)
    check_terms(launches[0], case, call, slope)
    assert launches[0].grid == (batch * segments, 1, 1)
    assert launches[0]["sums"] is last["sums"]
    assert (last["batch"], last["segments"], last["LANES"]) == (batch, segments, LANES)
    assert last.grid[0] == (1 + len(METRICS) if case.metrics else 1)
    assert last["beta"] == float(call.numbers[2])
    check_plan(launches[0], last, case.plan, length)


def check_backward(launches: list[Any], count: int) -> None:
    assert len(launches) == bool(count)
    for launch in launches:
        assert launch["size"] == count
        assert (launch.grid[0] - 1) * launch["BLOCK"] < count <= launch.grid[0] * launch["BLOCK"]
        assert launch["slope"].is_contiguous()
        assert launch["grad"].is_contiguous()


class TestLaunches(TritonHost):
    modules = tuple(
        f"rl_kernels.grpo_loss.backends.triton.{name}"
        for name in ("groups", "terms", "tokens", "sequence", "kernels", "reduce", "backend")
    )
    bugs = (
        Bug("stride of rewards taken for 1", "rewards.stride(0)", "1"),
        Bug("sums of another layout", "new_empty(*shape, dtype", "new_empty(*shape[::-1], dtype"),
        Bug("last tokens are not scaled", "ceil_div(size, GRADIENT_BLOCK)", "max(size // GRADIENT_BLOCK, 1)"),
        Bug("any layout of rows is read", "x.stride(1) == 1 if", "True if"),
        Bug("numbers of the first call are kept", "arguments[NUMBERS].tolist()", "call.numbers.tolist()"),
    )
    calls = (
        None,
        Case((8, 100), (4, 4)),
        Case((8, 129), (1, 4, 3), layout="pitch", old=False),
        Case((6, 4096), (2, 2, 2), layout="column", ref=False, spread=True),
        Case((6, 4097), (2, 2, 2), layout="pitch", ref=False, spread=True),
        Case((514, 3), (257, 257), old=False),
        Case((512, 3), (256, 256), dtype=torch.bfloat16),
        Case((1100, 1), (550, 550), layout="column"),
        Case((1026, 2), (513, 512, 1)),
        Case((2, 3 * SEGMENT + 1), (2,), layout="pitch"),
        Case((4, 0), (2, 2)),
        Case((4, 9), scores="sequences"),
        Case((4, 9), scores="tokens", layout="column"),
        Case((4, 9), scores="expanded"),
        Case((4, 9), (2, 2), divisor=True),
        Case(
            (4, 1023), (2, 2), layout="column", plan=Formula(level="sequence", bounds="dual", kl_correction="corrected")
        ),
        Case((2, 1025), (2,), plan=Formula(level="sequence", mean="sequences"), metrics=True),
        Case((3, 3 * SEGMENT + 1), (1, 2), layout="pitch", plan=Formula(kind="cispo", kl="k2", rollout="mask")),
        Case((4, 20), scores="tokens", metrics=True),
    )

    def check(self, case: Case | None, backend: Any, recorder: TritonRecorder) -> None:
        """Check the launches of a loss, for numbers that vary from call to call; without a case, of advantages."""
        if case is None:
            self.check_advantages(backend, recorder)
            return
        call = drawn(case)
        for function in (backend.forward, backend.forward_grad):
            launch = function.prepare(*call)
            for numbers in (NUMBERS, OTHERS):
                later = call._replace(numbers=torch.tensor(numbers, dtype=torch.float64))
                recorder.launches.clear()
                results = launch(*later)
                check_loss(recorder.launches, case, later, function is backend.forward_grad)
        recorder.launches.clear()
        *_, count, slope = results
        backend.backward(call.current_logps, count, slope.t().contiguous().t(), torch.ones(()))
        check_backward(recorder.launches, call.current_logps.numel())

    def check_advantages(self, backend: Any, recorder: TritonRecorder) -> None:
        for sizes in ((2, 2), (16,) * 3, (17, 17), (256,) * 2, (257,) * 2, (512, 512), (1, 300, 7), (1, 5000)):
            rewards, eps = torch.rand(2 * sum(sizes))[::2], torch.tensor(1e-3).double()
            boundaries = boundaries_of(sizes)
            recorder.launches.clear()
            out = backend.advantages(rewards, boundaries, 0 if boundaries is not None else sizes[0], eps, ESTIMATOR)
            (launch,) = recorder.launches
            assert launch.grid == (len(sizes), 1, 1)
            assert (launch["count"], launch["stride"], launch["eps"]) == (len(rewards), 2, pytest.approx(1e-3))
            assert launch["out"] is out
            check_groups(launch, launch["LANES"], sizes)
