"""The host side of the Triton backend without Triton: what it launches is what the shapes imply; planted bugs show."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonLaunch, TritonRecorder
from rl_kernels.grpo_loss.outputs import METRICS
from rl_kernels.grpo_loss.plan import Numbers, Plan

MODULES = tuple(
    f"rl_kernels.grpo_loss.backends.triton.{name}"
    for name in (
        *("groups", "terms", "tokens", "metrics", "sequence", "kernels", "reduce"),
        *("objectives", "plain", "planned", "backend"),
    )
)
BUGS = (
    Bug("stride of rewards taken for 1", "rewards.stride(0)", "1"),
    Bug("sums of another layout", "(segments_of(length), 3, batch)", "(batch, 3, segments_of(length))"),
    Bug("last tokens are not scaled", "-(-size // GRADIENT_BLOCK)", "max(size // GRADIENT_BLOCK, 1)"),
)
FAILURES = (AssertionError, RuntimeError)
SEGMENT, LANES = 4096, 256
"""Tokens of a segment, and most lanes: part of the order of the sums."""
Plant = Callable[[], AbstractContextManager[None]]
NUMBERS = Numbers(clip_low=0.1, clip_high=0.3, beta=0.25, eps=1e-3)


def power(x: int) -> bool:
    return x > 0 and x & (x - 1) == 0


def check_groups(launch: TritonLaunch, lanes: int, sizes: list[int]) -> None:
    """Lanes are a power of two up to 256; one step is enough only if no group has more rewards than that."""
    assert power(lanes)
    assert lanes <= LANES
    assert not launch["ONE_STEP"] or max(sizes) <= lanes
    # Fewer lanes than rewards would change the order of their sum.
    assert lanes >= min(max(sizes), LANES)
    boundaries = launch["boundaries"]
    assert launch["groups"] == (sizes[0] if boundaries is None else len(sizes))
    if boundaries is not None:
        assert boundaries.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]


def check_inputs(launch: TritonLaunch, names: dict[str, str], batch: int, length: int) -> None:
    """Rows of what a token has lie in one piece; their pitch is that of the tensor."""
    for name, stride in names.items():
        value = launch[name]
        if value is None:
            assert launch[stride] == 0
        elif value.ndim == 2:
            assert value.shape == (batch, length)
            assert value.stride(1) == 1 or length == 1
            assert launch[stride] == value.stride(0)
        else:
            assert value.shape == (batch,)
            assert launch[stride] == value.stride(0)


def check_terms(launch: TritonLaunch, call: dict[str, Any], slope: bool) -> int:
    """Hold either kernel of terms to the call; return the number of segments."""
    batch, length = call["shape"]
    segments = max(-(-length // SEGMENT), 1)
    names = {name: f"{name}_row" for name in ("current", "old", "ref", "mask")}
    check_inputs(launch, names | {"scores": "score_row"}, batch, length)
    for name in ("old", "ref"):
        assert (launch[name] is not None) == call.get(name, True)
    assert torch.equal(launch["mask"], call["given"].mask)
    quantities = launch["sums"].shape[1]
    assert quantities == 3 + (len(METRICS) if call.get("metrics") else 0)
    assert (launch["sums"].shape, launch["sums"].dtype) == ((segments, quantities, batch), torch.float32)
    assert launch["SEGMENT"] == SEGMENT
    assert power(launch["LANES"])
    assert launch.options["num_warps"] * 1024 >= launch["LANES"] >= min(length, 128)
    assert (launch["slope"] is not None) == slope
    if slope:
        assert launch["slope"].is_contiguous()
        assert launch["slope"].dtype == torch.float32
        assert launch["slope"].shape == (batch, length)
    assert [round(launch[name], 6) for name in ("low", "high", "beta", "eps")] == [0.9, 1.3, 0.25, 1e-3]
    if "sizes" in call:
        check_groups(launch, launch["GROUP_LANES"], call["sizes"])
        assert launch["PER_TOKEN"] is False
    else:
        assert launch["GROUP_LANES"] == 0
        assert launch["PER_TOKEN"] == (call["scores"] == "tokens")
    return segments


def check_loss(launches: list[TritonLaunch], call: dict[str, Any], slope: bool) -> None:
    (batch, length), plan = call["shape"], call.get("plan", Plan())
    names = [launch.name for launch in launches]
    plain = plan == Plan() and not call.get("metrics")
    if plain:
        assert names == (["plain_terms", "plain_sum"] if length else ["plain_sum"])
    else:
        assert names == ["terms", "reduce"]
    last, segments = launches[-1], -(-length // SEGMENT)
    if len(launches) == 2:
        segments = check_terms(launches[0], call, slope)
        assert launches[0].grid == ((batch, segments, 1) if plain else (batch * segments, 1, 1))
        assert launches[0]["sums"] is last["sums"]
    assert (last["batch"], last["segments"], last["LANES"]) == (batch, segments, LANES)
    assert last.grid[0] == (1 + len(METRICS) if call.get("metrics") else 1)
    assert last["beta"] == 0.25
    if plain:
        assert last["HAS_REF"] == call.get("ref", True)
        return
    check_plan(launches[0], plan)
    if plan.level == "sequence":
        assert launches[0]["WHOLE"] == (length <= launches[0]["LANES"])
    else:
        assert launches[0]["WHOLE"] is False
        assert launches[0]["LANES"] <= LANES
    assert launches[0]["MEAN_SEQ"] == last["MEAN_SEQ"] == (plan.mean == "sequences")
    assert last["QUANTITIES"] == launches[0]["sums"].shape[1]


def check_plan(launch: TritonLaunch, plan: Plan) -> None:
    """Every choice of the plan reaches the kernel, by the numbers that its source compares with."""
    assert launch["KIND"] == ("clip", "sapo", "cispo", "vespo", "reinforce").index(plan.kind)
    assert launch["BOUNDS"] == ("none", "delta", "dual").index(plan.bounds)
    assert launch["MODE"] == ("given", "truncate", "mask").index(plan.rollout)
    assert (launch["SEQ"], launch["CORRECTED"]) == (plan.level == "sequence", plan.kl_correction == "corrected")
    assert f"k{launch['KL']}" == plan.kl


def lying(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "column":
        return x.t().contiguous().t()
    if how == "pitch":
        return torch.cat((x, x[:, :1]), 1)[:, : x.shape[1]]
    return x


CALLS: tuple[dict[str, Any], ...] = (
    {"shape": (8, 100), "sizes": [4, 4]},
    {"shape": (8, 129), "sizes": [1, 4, 3], "layout": "pitch", "old": False},
    {"shape": (6, 4096), "sizes": [2] * 3, "layout": "column", "ref": False, "rewards": "apart"},
    {"shape": (514, 3), "sizes": [257, 257]},
    {"shape": (512, 3), "sizes": [256, 256]},
    {"shape": (1100, 1), "sizes": [550, 550], "layout": "column"},
    {"shape": (1026, 2), "sizes": [513, 512, 1]},
    {"shape": (2, 3 * SEGMENT + 1), "sizes": [2], "layout": "pitch"},
    {"shape": (4, 0), "sizes": [2, 2]},
    {"shape": (4, 9), "scores": "sequences"},
    {"shape": (4, 9), "scores": "tokens", "layout": "column"},
    {"shape": (4, 9), "scores": "expanded"},
    {
        "shape": (4, 1023),
        "sizes": [2, 2],
        "plan": Plan(level="sequence", bounds="dual", kl_correction="corrected"),
        "layout": "column",
    },
    {"shape": (2, 1025), "sizes": [2], "plan": Plan(level="sequence", mean="sequences"), "metrics": True},
    {
        "shape": (3, 3 * SEGMENT + 1),
        "sizes": [1, 2],
        "plan": Plan(kind="cispo", kl="k2", rollout="mask"),
        "layout": "pitch",
    },
    {"shape": (4, 20), "scores": "tokens", "metrics": True},
)


def drawn(call: dict[str, Any]) -> Any:
    """Return the arguments of a raw loss op."""
    from rl_kernels.grpo_loss.call import LossCall

    batch, length = call["shape"]
    current, old, ref = (lying(-torch.rand(batch, length), call.get("layout", "row")) for _ in range(3))
    rewards, boundaries, samples, advantages = None, None, 0, None
    if "sizes" in call:
        sizes = call["sizes"]
        rewards = torch.rand(2 * batch)[::2] if call.get("rewards") == "apart" else torch.rand(batch)
        if len(set(sizes)) == 1:
            samples = sizes[0]
        else:
            boundaries = torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)])
    else:
        advantages = {"sequences": torch.rand(batch), "tokens": lying(torch.rand(batch, length), "column")}.get(
            call["scores"], torch.rand(batch, 1).expand(batch, length)
        )
    mask = lying(torch.rand(batch, length) < 0.7, call.get("layout", "row"))
    old, ref = old if call.get("old", True) else None, ref if call.get("ref", True) else None
    numbers, plan = torch.tensor(NUMBERS, dtype=torch.float64), call.get("plan", Plan()).text
    options = (rewards, boundaries, samples, advantages, mask, None, None, None, None, length)
    return LossCall(current, old, ref, *options, numbers, plan, "population,max,keep", bool(call.get("metrics")))


def hold_losses(recorder: TritonRecorder) -> None:
    backend = importlib.import_module("rl_kernels.grpo_loss.backends.triton.backend")
    for call in CALLS:
        call = {**call, "given": drawn(call)}
        for name in ("forward", "forward_grad"):
            recorder.launches.clear()
            results = getattr(backend, name)(*call["given"])
            check_loss(recorder.launches, call, name == "forward_grad")
        recorder.launches.clear()
        current, slope = call["given"].current_logps, results[-1]
        backend.backward(current, results[-2], slope.t().contiguous().t(), torch.ones(()))
        for launch in recorder.launches:
            assert launch["size"] == current.numel()
            assert (launch.grid[0] - 1) * launch["BLOCK"] < current.numel() <= launch.grid[0] * launch["BLOCK"]
            assert launch["slope"].is_contiguous()
            assert launch["grad"].is_contiguous()
        assert len(recorder.launches) == bool(current.numel())


def hold_advantages(recorder: TritonRecorder) -> None:
    groups = importlib.import_module("rl_kernels.grpo_loss.backends.triton.groups")
    for sizes in ([2, 2], [16] * 3, [17, 17], [256] * 2, [257] * 2, [512, 512], [1, 300, 7], [1, 5000]):
        rewards = torch.rand(2 * sum(sizes))[::2]
        alike = len(set(sizes)) == 1
        boundaries = None if alike else torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)])
        recorder.launches.clear()
        out = groups.advantages(
            rewards, boundaries, sizes[0] * alike, torch.tensor(1e-3).double(), "population,max,keep"
        )
        (launch,) = recorder.launches
        assert launch.grid == (len(sizes), 1, 1)
        assert (launch["count"], launch["stride"], launch["eps"]) == (len(rewards), 2, pytest.approx(1e-3))
        assert launch["out"] is out
        check_groups(launch, launch["LANES"], sizes)


def hold_all(plant: Plant = nullcontext) -> None:
    recorder = TritonRecorder()
    with recorder.pretended(), plant():
        hold_advantages(recorder)
        hold_losses(recorder)


def test_kernels_are_launched_with_what_the_shapes_imply() -> None:
    hold_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_the_host_code_shows_in_the_launches(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        hold_all(partial(planted, MODULES, bug))
