"""grpo_loss over ranks in several processes over gloo: one process's bits, and one error for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.grpo_loss import (
    LossAndMetrics,
    Normalizer,
    Objective,
    group_advantages,
    grpo_loss,
    grpo_loss_from_advantages,
)
from rl_kernels.grpo_loss.ranks import shared_groups

BATCH, LENGTH, RANKS = 8, 13, 2
CUTS = ((4, 4), (3, 5), (0, 8))
TOKENS = ("current_logps", "old_logps", "ref_logps", "completion_mask")
LOSSES: tuple[dict[str, Any], ...] = (
    {"samples_per_prompt": 4, "beta": 0.1},
    # Groups that straddle ranks.
    {"group_boundaries": [0, 1, 6, 8], "return_metrics": True},
    {"group_boundaries": torch.tensor([0, 3, 8]), "objective": Objective(advantage_estimator="batch", skip_nan=True)},
    {"samples_per_prompt": 8, "loss_type": "gspo", "beta": 0.1, "return_metrics": True},
    {"samples_per_prompt": 2, "loss_type": "vespo", "normalizer": Normalizer(num_tokens=torch.tensor(91))},
)


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = Draw(torch.float32, seed=17)
    current = draw.uniform(1e-3, 1.0, BATCH, LENGTH).log()
    old, ref = ((current + draw.normal(BATCH, LENGTH, scale=0.3)).clamp(max=0).to(dtype) for _ in range(2))
    rewards = draw.normal(BATCH)
    result = {"current_logps": current.to(dtype), "old_logps": old, "ref_logps": ref}
    return {**result, "rewards": rewards, "completion_mask": draw.mask(0.7, BATCH, LENGTH)}


def results(function: Callable[..., Any], call: dict[str, Any]) -> list[torch.Tensor]:
    """Return loss, its parts, metrics and gradient."""
    current = call["current_logps"].clone().requires_grad_()
    # The same value without a gradient, by the other raw op.
    result, plain = function(**{**call, "current_logps": current}), function(**call)
    (output, metrics), (other, _) = (x if isinstance(x, LossAndMetrics) else (x, None) for x in (result, plain))
    assert output.loss.isfinite()
    assert torch.equal(other.loss, output.loss)
    # Not a power of two, so that a product has a rounding.
    (output.loss * 3).backward()
    return [*(x.detach() for x in output), *([] if metrics is None else [metrics]), current.grad]


def over_ranks(function: Callable[..., Any] = grpo_loss, **call: Any) -> Any:
    """Call a loss for the batch of all ranks."""
    return function(**call, process_group=distributed.group.WORLD)


def own(rank: int, counts: tuple[int, ...], call: dict[str, Any], *names: str) -> dict[str, Any]:
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return {**call, **{name: call[name][rows] for name in (*TOKENS, *names)}}


def same(rank: int, counts: tuple[int, ...], result: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Say whether this rank has the bits of one process."""
    expected = [*expected[:-1], expected[-1][sum(counts[:rank]) : sum(counts[: rank + 1])]]
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(result, expected, strict=True))


def bits(rank: int) -> dict[str, bool]:
    """Return whether each call has the bits of one process."""
    result = {}
    for number, options in enumerate(LOSSES):
        for dtype in (torch.float32, torch.bfloat16)[: 1 if number else 2]:
            call = {**drawn(dtype), **options}
            call["rewards"][5] = torch.nan if "objective" in options else 2.0
            expected = results(grpo_loss, call)
            for counts, validate in ((CUTS[0], False), *((cut, True) for cut in CUTS)):
                values = results(partial(over_ranks, validate=validate), own(rank, counts, call, "rewards"))
                result[f"{number} {dtype} {counts} {validate}"] = same(rank, counts, values, expected)
    counts, call, mesh = CUTS[1], drawn(), init_device_mesh("cpu", (RANKS,))
    a = group_advantages(call["rewards"], group_boundaries=[0, 3, 8])
    mine = own(rank, counts, call, "rewards")["rewards"]
    values = group_advantages(mine, group_boundaries=[0, 3, 8], process_group=mesh)
    result["advantages"] = same(rank, counts, [values], [a])
    call = {**call, "advantages": a, "loss_type": "grpo", "beta": 0.1}
    del call["rewards"]
    mine = own(rank, counts, call, "advantages")
    # Other padding than on the other ranks.
    mine |= {k: torch.nn.functional.pad(mine[k], (0, rank)) for k in TOKENS}
    *values, grad = results(partial(over_ranks, grpo_loss_from_advantages), mine)
    expected = results(grpo_loss_from_advantages, call)
    result["from advantages"] = same(rank, counts, [*values, grad[:, :LENGTH]], expected) and not grad[:, LENGTH:].any()
    return result


def compiled(call: dict[str, Any], rank: int) -> None:
    """Require that a compiled call breaks the graph on rank 0, or raises if it may not."""
    # PyTorch 2.11 fails where it breaks the graph.
    if torch.__version__ < "2.13":
        return
    expected = over_ranks(**call).loss * 2

    def step(call: dict[str, Any]) -> torch.Tensor:
        return over_ranks(**call).loss * 2

    # The other rank joins the exchange.
    result = step(call) if rank else torch.compile(step, backend="aot_eager")(call)
    assert torch.equal(result, expected)
    if rank == 0:
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(step, backend="aot_eager", fullgraph=True)(call)


def bad_calls(call: dict[str, Any], rank: int) -> dict[str, dict[str, Any]]:
    """Return what is wrong on rank 1, or on all, by the start of the error."""
    differs, on_one = "expected the same on every rank of process_group, got", rank == 1
    return {
        "ValueError: beta: expected a number >= 0, got -1.0 (on rank 1 of process_group)": {"beta": -1.0}
        if on_one
        else {},
        "ValueError: rewards: expected shape": {"rewards": call["rewards"][:1]} if on_one else {},
        f"ValueError: loss_type: {differs} grpo, dapo": {"loss_type": "dapo" if on_one else "grpo"},
        f"ValueError: samples_per_prompt: {differs} 4, 2": {"samples_per_prompt": 2 if on_one else 4},
        "ValueError: group_boundaries: expected the same": {
            "samples_per_prompt": None,
            "group_boundaries": torch.tensor([0, 3 + on_one, 8]),
        },
        "ValueError: samples_per_prompt: expected a divisor of the 8 rewards, got 3": {"samples_per_prompt": 3},
        "ValueError: samples_per_prompt, group_boundaries: expected exactly one of them": {"group_boundaries": [0, 8]},
        f"ValueError: current_logps: {differs} torch.float32, torch.bf": {
            "current_logps": call["current_logps"].bfloat16() if on_one else call["current_logps"]
        },
        f"ValueError: old_logps: {differs} torch.float32, None": {"old_logps": None if on_one else call["old_logps"]},
        f"ValueError: num_tokens: {differs} 3, 4": {"normalizer": Normalizer(num_tokens=3 + on_one)},
        f"ValueError: return_metrics: {differs} False, True": {"return_metrics": on_one},
        "ValueError: backend: grpo_loss has no backend": {"backend": "nonesuch" if on_one else None},
    }


def in_ranks(rank: int) -> tuple[dict[str, bool], list[tuple[str, str]]]:
    """Return whether calls have the bits of one process, and the errors of bad calls."""
    call = {**own(rank, CUTS[0], drawn(), "rewards"), "samples_per_prompt": 4}
    compiled(call, rank)
    errors = []
    for start, changes in bad_calls(call, rank).items():
        with pytest.raises((TypeError, ValueError)) as caught:
            over_ranks(**{**call, **changes})
        errors.append((start, f"{caught.type.__name__}: {caught.value}"))
    with pytest.raises(ValueError, match="eps: expected a number > 0") as caught:
        group_advantages(call["rewards"], samples_per_prompt=4, eps=-rank, process_group=distributed.group.WORLD)
    return bits(rank), [*errors, ("eps", str(caught.value))]


def test_ranks_have_the_bits_of_one_process_and_raise_the_same_error() -> None:
    results = run_ranks(in_ranks, RANKS)
    for result, errors in results:
        assert not [name for name, is_same in result.items() if not is_same]
        assert errors == results[0][1]
    for start, result in results[0][1]:
        assert result.startswith(start)


def test_process_group_is_checked() -> None:
    call = {**drawn(), "samples_per_prompt": 4}
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup or a DeviceMesh"):
        grpo_loss(**call, process_group=3)
    with pytest.raises(TypeError, match="process_group: expected a ProcessGroup or a DeviceMesh"):
        group_advantages(call["rewards"], samples_per_prompt=4, process_group="dp")


def test_ranks_compare_the_bits_of_tensors() -> None:
    def form(boundaries: Any) -> Any:
        return shared_groups((None, boundaries))["group_boundaries"]

    one = torch.tensor([0.5, 3.0])
    for other in (one.nextafter(one + 1), one.double(), one[None], one.flip(0), one.tolist()):
        assert form(other) != form(one)
    assert form(one.clone()) == form(one) == str(form(one))
