"""grpo_loss in PyTorch, for any device: element-wise operations and sums in a fixed order, no host sync.

Reduction order, which is the contract of this backend: ``rowwise.sums.row_sum`` sums a sequence from its start, then
the sums of the sequences. Masked positions are zeros in both, so padding and masked sequences at the end change no bit.
Packed sequences are padded first. Rewards are summed in FP64 by a tree over each group, from the group's start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.grpo_loss.backends.native import metrics
from rl_kernels.grpo_loss.backends.native.advantages import advantages
from rl_kernels.grpo_loss.backends.native.terms import Block, Terms, lanes, terms_of
from rl_kernels.grpo_loss.call import SUMS, Formula, LossCall, Numbers

__all__ = ["advantages", "backward", "backward_inplace", "combine", "forward", "forward_grad", "sums", "sums_grad"]

BLOCK_ELEMENTS = 1 << 16
"""Tokens processed at once. Sequences are independent up to their sums, so this changes no bit."""


def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics)."""
    return _loss(LossCall(*arguments), sums(*arguments))[:4]


def forward_grad(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, divisor, slope); slope has the shape of current_logps."""
    totals, slope = sums_grad(*arguments)
    return *_loss(LossCall(*arguments), totals), slope


def sums(*arguments: Any) -> torch.Tensor:
    """Return the sums of each sequence, ``[3, B]``, or ``[14, B]`` with metrics."""
    return _joined([totals for totals, _ in _blocks(LossCall(*arguments))], 1)


def sums_grad(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sums, slope); slope has the shape of current_logps."""
    call = LossCall(*arguments)
    totals, slopes = zip(*[(part, _marked(terms)) for part, terms in _blocks(call)], strict=True)
    slope = _joined(slopes, 0).contiguous()
    if call.cu_seqlens is not None:
        slope = packed(slope, call.cu_seqlens, call.current_logps.shape[0])
    return _joined(totals, 1), slope


def combine(
    sums: torch.Tensor, normalizer: torch.Tensor | None, length: int, numbers: torch.Tensor, plan: str
) -> tuple[torch.Tensor, ...]:
    """Return (loss, policy_loss, kl, metrics, divisor) of the sequences whose sums are given."""
    n, mean = Numbers(*numbers.tolist()), Formula.parse(plan).mean
    terms, counts = sums[:2], sums[2]
    if mean == "sequences":
        terms = terms / counts.clamp(min=1)
    divisor = _divisor(counts, normalizer, length, mean, n)
    policy_loss, kl = (total / divisor for total in row_sum(terms).unbind())
    has_metrics = sums.shape[0] > SUMS
    values = metrics.vector(sums[SUMS:], counts) if has_metrics else sums.new_empty(0, dtype=torch.float32)
    return policy_loss + n.beta * kl, policy_loss, kl, values, divisor


def backward(
    current_logps: torch.Tensor, divisor: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """Return the gradient in the dtype of current_logps; 0 at masked positions for any upstream gradient."""
    grad = slope.clone(memory_format=torch.contiguous_format)
    backward_inplace(grad, divisor, upstream)
    return grad.to(current_logps.dtype)


def backward_inplace(slope: torch.Tensor, divisor: torch.Tensor, upstream: torch.Tensor) -> None:
    """Write the gradient, as ``backward`` returns it in the dtype of the slope, over the slope."""
    bits = slope.view(torch.int64 if slope.dtype == torch.float64 else torch.int32)
    active = lanes(bits != torch.iinfo(bits.dtype).min, slope.dtype)
    slope.mul_(upstream.to(slope.dtype) / divisor)
    bits.bitwise_and_(active)


def _loss(call: LossCall, totals: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return combine(totals, call.normalizer, call.length, call.numbers, call.plan)


def _blocks(call: LossCall) -> Iterator[tuple[torch.Tensor, Terms]]:
    """Yield the sums ``[3, b]``, with metrics ``[14, b]``, and the terms of blocks of sequences, at least one."""
    formula, n = call.formula, call.values
    inputs = _inputs(call, n)
    count, length = inputs.current.shape
    height = max(BLOCK_ELEMENTS // max(length, 1), 1)
    for row in range(0, max(count, 1), height):
        block = inputs.rows(slice(row, row + height))
        terms = terms_of(block, formula, n, call.with_metrics)
        policy = row_sum(terms.policy)
        totals = torch.stack(
            (policy, torch.zeros_like(policy) if terms.kl is None else row_sum(terms.kl), terms.counts)
        )
        if call.with_metrics:
            totals = torch.cat((totals, metrics.of_block(block, terms, formula, n)))
        yield totals, terms


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _inputs(call: LossCall, n: Numbers) -> Block:
    """Return the tensors of all sequences, padded to ``[B, T]``."""
    current, mask, scores = call.current_logps, call.mask.bool(), _advantages(call, n)
    tensors = (current, call.old_logps, call.ref_logps, scores, mask, call.rollout_ratio, call.entropy)
    if call.cu_seqlens is None:
        return Block(*tensors)
    layout = Padding(call.cu_seqlens, call.max_seqlen, current.shape[0])
    padded = [None if x is None else layout.padded(x, i in (3, 5)) for i, x in enumerate(tensors)]
    inside = layout.padded(mask, False) & layout.inside
    return Block(*padded)._replace(mask=inside)  # type: ignore[arg-type]


def _advantages(call: LossCall, n: Numbers) -> torch.Tensor:
    """Return the given advantages, or compute them ``[B]`` from the rewards."""
    rewards = call.rewards
    if rewards is None:
        assert call.advantages is not None
        return call.advantages
    wide = rewards.to(torch.promote_types(rewards.dtype, call.current_logps.dtype))
    eps = call.numbers.new_full((), n.eps)
    return advantages(wide, call.boundaries, call.samples, eps, call.estimator)


def _divisor(counts: torch.Tensor, normalizer: torch.Tensor | None, length: int, mean: str, n: Numbers) -> torch.Tensor:
    """Return the divisor of the batch sums: a number of tokens or sequences, for ``sums`` times a length."""
    if normalizer is not None:
        count = normalizer.to(counts.dtype)
        # Where no token is active a count of 0 is right: the loss is 0 / 1, not 0 / 0.
        count = torch.where((count == 0) & ~counts.any(), 1.0, count)
    elif n.divisor:
        count = counts.new_full((), n.divisor)
    elif mean == "tokens":
        return counts.sum(dtype=torch.int64).clamp(min=1).to(counts.dtype)
    else:
        count = counts.new_full((), max(counts.shape[0], 1))
    return count * (n.length or max(length, 1)) if mean == "sums" else count


def _marked(terms: Terms) -> torch.Tensor:
    """Return the slope with -0 at masked tokens, where it is 0, and nowhere else: adding 0 turns -0 into +0."""
    kind = terms.active.dtype
    terms.slope.add_(0.0).view(kind).bitwise_or_(~terms.active & torch.iinfo(kind).min)
    return terms.slope


class Padding:
    """Positions ``[B, T]`` of packed tokens ``[total]``: sequence i is ``cu_seqlens[i]:cu_seqlens[i + 1]``."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int, total: int) -> None:
        start, end = cu_seqlens[:-1].long()[:, None], cu_seqlens[1:].long()[:, None]
        index = start + torch.arange(max_seqlen, device=cu_seqlens.device)
        self.inside = index < end.clamp(max=total)
        # Unchecked offsets (validate=False) must not read out of bounds.
        self._index = index.clamp(0, max(total - 1, 0))
        self._total = total

    def padded(self, values: torch.Tensor, per_sequence: bool) -> torch.Tensor:
        """Return per-token values as ``[B, T]``, arbitrary outside the sequences; per-sequence values unchanged."""
        if per_sequence and values.ndim == 1:
            return values
        flat = values.reshape(-1)
        return flat[self._index] if self._total else flat.new_zeros(self._index.shape)


def packed(values: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Return values ``[B, T]`` packed to ``[total]``."""
    if not values.numel() or not total:
        return values.new_full((total,), -0.0)
    offsets = cu_seqlens.long()
    place = torch.arange(total, device=values.device)
    row = torch.bucketize(place, offsets[1:-1].contiguous(), right=True)
    column = (place - offsets[row]).clamp(0, values.shape[1] - 1)
    return values[row, column]
