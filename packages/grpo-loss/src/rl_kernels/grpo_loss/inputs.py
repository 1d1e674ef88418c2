"""Checks of what a loss is called with, a ``LossCall``, and of the groups of its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.extras import Divisor, check_count
from rl_kernels.grpo_loss.objective import Objective

MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *check.FLOATS)
SHOWN = 8
"""Largest number of offsets in an error message."""


def resolved(inputs: LossCall, divisor: Divisor, values: bool) -> LossCall:
    """Return the inputs with the values that only tensors or lists tell; ``values`` also checks offsets of groups."""
    current, count = inputs.current_logps, divisor.tensor
    boundaries, cu_seqlens, longest = inputs.boundaries, inputs.cu_seqlens, inputs.max_seqlen
    check.tensor("current_logps", current, check.FLOATS, ndim=2 if cu_seqlens is None else 1)
    if cu_seqlens is not None:
        _check_offset_tensor(inputs)
    if divisor.number == 0:
        # As a tensor, because the raw ops read the number 0 as no divisor.
        count = current.new_zeros(())
    if boundaries is not None:
        _check_rewards(inputs)
        assert inputs.rewards is not None
        boundaries = checked_groups(inputs.rewards, inputs.samples, boundaries, values=values)
    if cu_seqlens is not None and longest is None:
        longest = _longest(cu_seqlens)
    return inputs._replace(boundaries=boundaries, max_seqlen=longest, normalizer=count)


def check_inputs(inputs: LossCall, scored: str, objective: Objective, divisor_name: str) -> None:
    """Check all that depends on the kinds of resolved inputs, except the groups.

    Args:
        inputs: of a public function.
        scored: ``rewards`` or ``advantages``: the member that scores sequences or tokens.
        objective: the loss.
        divisor_name: name of the count that sums are divided by.

    Raises:
        TypeError, ValueError: an input is not as the public functions describe it; the message names it.
    """
    current, scores, ratio = inputs.current_logps, getattr(inputs, scored), inputs.rollout_ratio
    check.tensor("current_logps", current, check.FLOATS, ndim=2 if inputs.cu_seqlens is None else 1)
    if inputs.cu_seqlens is not None:
        check.integer("max_seqlen", inputs.max_seqlen, least=0, most=check.INT32)
    elif inputs.max_seqlen is not None:
        raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {inputs.max_seqlen}")
    if scored == "rewards":
        _check_rewards(inputs)
    else:
        _check_scores("advantages", scores, inputs)
    check.same_device(current_logps=current, **{scored: scores})
    beta, rollout = objective.numbers.beta, objective.plan.rollout
    if inputs.ref_logps is None and beta > 0:
        raise ValueError(f"ref_logps: expected a tensor with beta > 0 (beta is {beta}), got None")
    _check_tokens(inputs)
    if ratio is not None:
        _check_scores("rollout_ratio", ratio, inputs)
    elif rollout != "given":
        raise ValueError(f"rollout_mode: expected None without rollout_ratio, got {rollout!r}")
    check.same_device(current_logps=current, rollout_ratio=ratio, **{divisor_name: inputs.normalizer})


def _check_rewards(inputs: LossCall) -> None:
    rewards: Any = inputs.rewards
    check.tensor("rewards", rewards, check.FLOATS, ndim=1)
    check.shape("rewards", rewards, (inputs.batch,), "one per sequence of current_logps")


def _check_tokens(inputs: LossCall) -> None:
    """Check the tensors with one value per token."""
    current, mask = inputs.current_logps, inputs.mask
    optional = {"old_logps": inputs.old_logps, "ref_logps": inputs.ref_logps, "entropy": inputs.entropy}
    for name, value in optional.items():
        if value is not None:
            check.tensor(name, value, check.FLOATS)
            check.shape(name, value, current.shape, "that of current_logps")
    check.tensor("completion_mask", mask, MASKS)
    check.shape("completion_mask", mask, current.shape, "that of current_logps")
    check.same_device(current_logps=current, **optional, completion_mask=mask)


def _check_scores(name: str, value: torch.Tensor, inputs: LossCall) -> None:
    """Check a tensor with one value per sequence or per token."""
    check.tensor(name, value, check.FLOATS, least=1)
    expected: tuple[int, ...] = (inputs.batch,)
    if value.ndim != 1 or (inputs.cu_seqlens is not None and value.shape != expected):
        expected = inputs.current_logps.shape
    check.shape(name, value, expected, "one per sequence or per token of current_logps")


def check_groups(count: int, samples_per_prompt: int | None, group_boundaries: object) -> None:
    """Check that ``count`` rewards are grouped in exactly one way, and the size of the groups."""
    if (samples_per_prompt is None) == (group_boundaries is None):
        passed = "neither" if samples_per_prompt is None else "both"
        raise ValueError(f"samples_per_prompt, group_boundaries: expected exactly one of them, got {passed}")
    if samples_per_prompt is not None:
        check.integer("samples_per_prompt", samples_per_prompt, least=2)
        if count % samples_per_prompt:
            raise ValueError(f"samples_per_prompt: expected a divisor of the {count} rewards, got {samples_per_prompt}")


def checked_groups(
    rewards: torch.Tensor,
    samples_per_prompt: int | None,
    group_boundaries: Sequence[int] | torch.Tensor | None,
    *,
    values: bool,
) -> torch.Tensor | None:
    """Check the groups of ``rewards[B]``; return their offsets ``[G + 1]``, int64 on the device of the rewards, if any.

    ``values=False`` skips the check of offsets that are not on the CPU. Under torch.compile and graph capture the
    offsets of no tensor are checked.

    Raises:
        TypeError, ValueError: not exactly one way of grouping, or the groups do not cut ``rewards[B]``.
    """
    count, device = rewards.shape[0], rewards.device
    check_groups(count, samples_per_prompt, group_boundaries)
    if group_boundaries is None:
        return None
    if isinstance(group_boundaries, torch.Tensor):
        offsets = group_boundaries
        check.tensor("group_boundaries", offsets, check.INTEGERS, ndim=1)
        if offsets.device.type != "cpu" and offsets.device != device:
            raise ValueError(f"group_boundaries: expected device cpu or {device}, got {offsets.device}")
        least = 2 if count else 1
        if offsets.shape[0] < least:
            raise ValueError(f"group_boundaries: expected at least {least} offsets, got {offsets.shape[0]}")
        if (values or offsets.device.type == "cpu") and not values_hidden(offsets):
            _check_boundaries(offsets, count)
    else:
        offsets = torch.tensor(_listed(group_boundaries, count), dtype=torch.int64, device="cpu")
    # Non-blocking: the copy to a GPU must not wait for running kernels.
    return offsets.to(device, torch.int64, non_blocking=True).contiguous()


def _listed(boundaries: object, count: int) -> list[int]:
    if not isinstance(boundaries, Sequence) or isinstance(boundaries, (str, bytes)):
        raise TypeError(
            f"group_boundaries: expected a sequence of integers or a tensor, got {type(boundaries).__name__}"
        )
    offsets = list(boundaries)
    for offset in offsets:
        check.integer("group_boundaries", offset)
    _increasing(offsets, count)
    return offsets


def _increasing(offsets: list[int], count: int) -> None:
    if not offsets or offsets[0] != 0 or offsets[-1] != count or any(low >= high for low, high in pairwise(offsets)):
        shown = ", ".join(map(str, offsets[:SHOWN])) + (", ..." if len(offsets) > SHOWN else "")
        raise ValueError(
            f"group_boundaries: expected offsets that start at 0, increase strictly and end at {count} "
            f"(the number of rewards), got [{shown}]"
        )


def check_values(inputs: LossCall, divisor: Divisor | None) -> None:
    """Check the values of tensors, except the offsets of groups; none are read while they are hidden."""
    mask, cu_seqlens = inputs.mask, inputs.cu_seqlens
    if cu_seqlens is not None and not values_hidden(cu_seqlens):
        _check_offsets(cu_seqlens, inputs.current_logps.shape[0], inputs.max_seqlen)
    if mask.dtype != torch.bool and not values_hidden(mask):
        _check_mask(mask)
    if divisor is not None and inputs.normalizer is not None and not values_hidden(inputs.normalizer):
        check_count(inputs.normalizer, mask, divisor.name)


def _check_offset_tensor(inputs: LossCall) -> None:
    check.tensor("cu_seqlens", inputs.cu_seqlens, check.INTEGERS, ndim=1)
    assert inputs.cu_seqlens is not None
    if not inputs.cu_seqlens.shape[0]:
        raise ValueError("cu_seqlens: expected at least 1 offset, got 0")
    check.same_device(current_logps=inputs.current_logps, cu_seqlens=inputs.cu_seqlens)


def _longest(cu_seqlens: torch.Tensor) -> int:
    if values_hidden(cu_seqlens):
        raise ValueError("max_seqlen: expected an integer under torch.compile and graph capture, got None")
    return max(int(cu_seqlens.diff().max()), 0) if cu_seqlens.shape[0] > 1 else 0


def _zero_or_one(mask: torch.Tensor) -> None:
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f"completion_mask: expected values 0 and 1, got {wrong[0].item()}")


def _offsets(cu_seqlens: torch.Tensor, total: int, longest: int) -> None:
    lengths = cu_seqlens.diff()
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != total or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens: expected offsets that rise from 0 to {total} and never fall, got first {first}, last {last}"
        )
    if bool((lengths > longest).any()):
        raise ValueError(f"max_seqlen: expected at least {int(lengths.max())}, the longest sequence, got {longest}")


_check_mask = define_check("check_completion_mask", "(Tensor mask)", _zero_or_one)
_check_offsets = define_check("check_cu_seqlens", "(Tensor cu_seqlens, SymInt total, SymInt longest)", _offsets)
_check_boundaries = define_check(
    "check_group_boundaries",
    "(Tensor boundaries, SymInt count)",
    lambda boundaries, count: _increasing(boundaries.tolist(), count),
)
