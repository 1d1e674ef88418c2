"""grpo_loss over ranks in several processes over gloo: one process's bits, and one error for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.grpo_loss import (
    Extras,
    LossAndMetrics,
    Normaliser,
    Objective,
    group_advantages,
    grpo_loss,
    grpo_loss_from_advantages,
)

BATCH, LENGTH = 8, 13
COUNTS = {2: ((4, 4), (3, 5), (0, 8)), 4: ((2, 2, 2, 2), (1, 4, 0, 3))}
TOKENS = ("current_logps", "old_logps", "ref_logps", "completion_mask")
LOSSES: tuple[dict[str, Any], ...] = (
    {"samples_per_prompt": 4, "beta": 0.1},
    # Groups that straddle ranks.
    {"group_boundaries": [0, 1, 6, 8], "return_metrics": True},
    {"group_boundaries": torch.tensor([0, 3, 8]), "objective": Objective(advantage_estimator="batch", skip_nan=True)},
    {"samples_per_prompt": 8, "loss_type": "gspo", "beta": 0.1, "return_metrics": True},
    {"samples_per_prompt": 2, "loss_type": "dr_grpo"},
    {"samples_per_prompt": 2, "loss_type": "vespo", "normaliser": Normaliser(num_tokens=torch.tensor(91))},
)


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = Draw(torch.float32, seed=17)
    current = draw.uniform(1e-3, 1.0, BATCH, LENGTH).log()
    old, ref = ((current + draw.normal(BATCH, LENGTH, scale=0.3)).clamp(max=0).to(dtype) for _ in range(2))
    rewards = draw.normal(BATCH)
    found = {"current_logps": current.to(dtype), "old_logps": old, "ref_logps": ref}
    return {**found, "rewards": rewards, "completion_mask": draw.mask(0.7, BATCH, LENGTH)}


def results(function: Callable[..., Any], call: dict[str, Any]) -> list[torch.Tensor]:
    """Return loss, its parts, metrics and gradient."""
    current = call["current_logps"].clone().requires_grad_()
    found = function(**{**call, "current_logps": current})
    output, *metrics = found if isinstance(found, LossAndMetrics) else (found,)
    # The same value without a gradient, by the other raw op.
    plain = function(**call)
    assert output.loss.isfinite()
    assert torch.equal((plain.output if metrics else plain).loss, output.loss)
    # Not a power of two, so that a product has a rounding.
    (output.loss * 3).backward()
    assert current.grad is not None
    return [*(x.detach() for x in output), *metrics, current.grad]


def over_ranks(function: Callable[..., Any] = grpo_loss, **call: Any) -> Any:
    """Call a loss for the batch of all ranks."""
    normaliser = call.pop("normaliser", Normaliser())._replace(process_group=distributed.group.WORLD)
    return function(**call, normaliser=normaliser)


def own(rank: int, counts: tuple[int, ...], call: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return {**call, **{name: call[name][rows] for name in names}}


def differing(rank: int, counts: tuple[int, ...], found: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """Return how many bytes other than one process's."""
    expected = [*expected[:-1], expected[-1][sum(counts[:rank]) : sum(counts[: rank + 1])]]
    assert [x.shape for x in found] == [x.shape for x in expected]
    flat = [[x.reshape(-1).view(torch.uint8) for x in values] for values in (found, expected)]
    return sum(int((a != b).sum()) for a, b in zip(*flat, strict=True))


def bits(rank: int, world: int) -> dict[str, int]:
    """Return the number of differing bytes of each case on this rank."""
    found = {}
    for number, options in enumerate(LOSSES):
        for dtype in (torch.float32, torch.bfloat16) if not number else (torch.float32,):
            call = {**drawn(dtype), **options}
            call["rewards"][5] = torch.nan if "objective" in options else 2.0
            expected = results(grpo_loss, call)
            for counts in COUNTS[world]:
                for validate in (True, False) if len(set(counts)) == 1 else (True,):
                    mine = own(rank, counts, call, (*TOKENS, "rewards"))
                    made = results(partial(over_ranks, validate=validate), mine)
                    found[f"{number} {dtype} {counts} {validate}"] = differing(rank, counts, made, expected)
    counts, call = COUNTS[world][1], drawn()
    mesh = init_device_mesh("cpu", (world,))
    a = group_advantages(call["rewards"], group_boundaries=[0, 3, 8])
    mine = own(rank, counts, call, ("rewards",))["rewards"]
    made = group_advantages(mine, group_boundaries=[0, 3, 8], process_group=mesh)
    found["advantages"] = differing(rank, counts, [made], [a])
    call = {**call, "advantages": a, "loss_type": "grpo", "beta": 0.1}
    del call["rewards"]
    expected = results(grpo_loss_from_advantages, call)
    mine = own(rank, counts, call, (*TOKENS, "advantages"))
    if rank:
        # Other padding than on the other ranks.
        mine |= {k: torch.nn.functional.pad(mine[k], (0, rank)) for k in TOKENS}
    made = results(partial(over_ranks, grpo_loss_from_advantages), mine)
    assert not made[-1][:, LENGTH:].any()
    found["from advantages"] = differing(rank, counts, [*made[:-1], made[-1][:, :LENGTH]], expected)
    return found | {"packed": packed(rank, world)}


def packed(rank: int, world: int) -> int:
    """Return the differing bytes of packed sequences; ranks have other longest sequences."""
    counts = COUNTS[world][1]
    lengths = torch.tensor([3, 13, 1, 0, 7, 9, 13, 4])
    inside = torch.arange(LENGTH) < lengths[:, None]
    call = {**drawn(), "samples_per_prompt": 2, "loss_type": "dr_grpo"}
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    expected = results(grpo_loss, {**call, **{k: call[k][inside] for k in TOKENS}, "extras": Extras(cu_seqlens=ends)})
    first, last = sum(counts[:rank]), sum(counts[: rank + 1])
    mine = own(rank, counts, call, (*TOKENS, "rewards"))
    here = inside[first:last]
    mine |= {k: mine[k][here] for k in TOKENS} | {"extras": Extras(cu_seqlens=ends[first : last + 1] - ends[first])}
    made = results(over_ranks, mine)
    tokens = slice(int(ends[first]), int(ends[last]))
    return differing(0, (1,), [*made[:-1], made[-1][None]], [*expected[:-1], expected[-1][tokens][None]])


def compiled(call: dict[str, Any]) -> None:
    """Require that a call breaks the graph, or raises if it may not."""
    if torch.__version__ < "2.13":
        # PyTorch 2.11 fails where it breaks the graph.
        return
    expected = over_ranks(**call).loss * 2
    found = torch.compile(lambda call: over_ranks(**call).loss * 2, backend="aot_eager")(call)
    assert torch.equal(found, expected)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda call: over_ranks(**call).loss * 2, backend="aot_eager", fullgraph=True)(call)


def errors(rank: int) -> list[str]:
    """Return the messages that this rank gets."""
    call = {**own(rank, (4, 4), drawn(), (*TOKENS, "rewards")), "samples_per_prompt": 4}
    compiled(call)
    last = rank == 1
    bad: tuple[dict[str, Any], ...] = (
        {"beta": -1.0} if last else {},
        {"rewards": call["rewards"][:3]} if last else {},
        {"loss_type": "dapo" if last else "grpo"},
        {"samples_per_prompt": 2 if last else 4},
        {"samples_per_prompt": None, "group_boundaries": torch.tensor([0, 3 + last, 8])},
        {"samples_per_prompt": 3},
        {"group_boundaries": [0, 8]},
        {"current_logps": call["current_logps"].bfloat16() if last else call["current_logps"]},
        {"old_logps": None if last else call["old_logps"]},
        {"normaliser": Normaliser(num_tokens=3 + rank)},
        {"return_metrics": last},
        {"backend": "nonesuch" if last else None},
    )
    found = []
    for changes in bad:
        with pytest.raises((TypeError, ValueError)) as caught:
            over_ranks(**{**call, **changes})
        found.append(f"{caught.type.__name__}: {caught.value}")
    with pytest.raises(ValueError, match="eps") as caught:
        group_advantages(call["rewards"], samples_per_prompt=4, eps=-rank, process_group=distributed.group.WORLD)
    return [*found, str(caught.value)]


def test_two_ranks_have_the_bits_of_one_process_and_raise_the_same_error() -> None:
    first, second = run_ranks(both, 2, timeout=120)
    assert set(first[0].values()) | set(second[0].values()) == {0}
    assert first[1] == second[1]
    expected = (
        "ValueError: beta: expected a number >= 0, got -1.0 (on rank 1 of process_group)",
        "ValueError: rewards: expected shape",
        "ValueError: loss_type: expected the same on every rank of process_group, got grpo, dapo",
        "ValueError: samples_per_prompt: expected the same on every rank of process_group, got 4, 2",
        "ValueError: group_boundaries: expected the same",
        "ValueError: samples_per_prompt: expected a divisor of the 8 rewards, got 3",
        "ValueError: samples_per_prompt, group_boundaries: expected exactly one of them, got both",
        "ValueError: current_logps: expected the same on every rank of process_group, got torch.float32, torch.bf",
        "ValueError: old_logps: expected the same on every rank of process_group, got torch.float32, None",
        "ValueError: num_tokens: expected the same on every rank of process_group, got 3, 4",
        "ValueError: return_metrics: expected the same on every rank of process_group, got False, True",
        "ValueError: backend: grpo_loss has no backend",
        "eps: expected a number > 0",
    )
    for found, start in zip(first[1], expected, strict=True):
        assert found.startswith(start), found


def both(rank: int) -> tuple[dict[str, int], list[str]]:
    return bits(rank, 2), errors(rank)


def four(rank: int) -> dict[str, int]:
    return bits(rank, 4)


def test_four_ranks_have_the_bits_of_one_process() -> None:
    assert {value for found in run_ranks(four, 4, timeout=120) for value in found.values()} == {0}


def test_process_group_is_checked() -> None:
    call = {**drawn(), "samples_per_prompt": 4}
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup or a DeviceMesh"):
        grpo_loss(**call, normaliser=Normaliser(process_group=3))
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup or a DeviceMesh"):
        group_advantages(call["rewards"], samples_per_prompt=4, process_group="dp")
