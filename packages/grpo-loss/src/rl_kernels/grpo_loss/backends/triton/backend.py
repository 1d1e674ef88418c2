"""grpo_loss in Triton: every token is read once, in three launches: the terms, their sum, and the gradient.

Reduction order, which is the contract of this backend: a sequence is cut into segments of 4096 tokens from its start.
Token i of a segment is added to lane i mod LANES, in ascending order, and a tree adds the lanes; the segments of a
sequence are added in ascending order. Sequence sums are added in the same way, sequence i to lane i mod 256, and so are
the rewards of a group, in FP64 and from the group's start. The trees are explicit, four neighbors first and then
halves, so no bit depends on the compiler's layout, on strides, addresses or the number of warps. Nor does the number of
lanes change a bit if there are at least as many lanes as terms: unused lanes hold zeros. Masked tokens are zeros.

One program computes one segment of a sequence. Values of the whole sequence (its number of tokens, its ratio, the slope
that its tokens share) are recomputed by each of its programs, in passes over the sequence before its own segment.
Objectives whose passes sum log-probabilities use up to 1024 lanes, in the passes and after them: sequences of up to
1024 tokens stay in registers, longer ones are read from memory once and then from the cache. All others use 256 lanes.
A policy term that all tokens of a sequence share is multiplied by their number instead of summed, and a KL weighted by
the ratio of the sequence is multiplied by it after the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.constants import TOKEN_SEGMENT as SEGMENT
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.grpo_loss.backends.triton.groups import LANES, Scores, advantages, lanes_for, scores_of_call
from rl_kernels.grpo_loss.backends.triton.kernels import terms
from rl_kernels.grpo_loss.backends.triton.reduce import LEAST, MOST, gradient, reduce
from rl_kernels.grpo_loss.call import SUMS, Formula, LossCall
from rl_kernels.grpo_loss.outputs import METRICS

__all__ = ["advantages", "backward", "backward_inplace", "combine", "forward", "forward_grad", "sums", "sums_grad"]

FEWEST = 128
"""Fewest lanes, and in general lanes per warp: four tokens to a thread, which is one 16-byte load in FP32."""
WIDE = 1024
"""Largest number of lanes for objectives with a pass over each sequence before its terms: so many that few sequences
run at once, and the second read hits the cache."""
SHARE, NARROW = 256, 1024
"""Lanes per warp for these objectives: in general, and where one warp keeps a whole sequence in registers."""
WARPS = 4
"""Warps of the program that adds all sequences; the order is explicit, so they change no bit."""
GRADIENT_BLOCK, GRADIENT_WARPS = 1024, 4
"""Tokens that one program of the backward pass scales, and its warps: element by element, so they change no bit."""
TOKENS = ("current_logps", "old_logps", "ref_logps", "mask")
"""The first operands of the kernel of terms; the scores follow, at SCORES."""
SCORES = len(TOKENS)
ROWS = SCORES + 3
"""Number of the operands that have a stride of rows: they come first."""
NUMBERS, NORMALIZER = LossCall._fields.index("numbers"), LossCall._fields.index("normalizer")


@prepared
def combine(
    sums: torch.Tensor, normalizer: torch.Tensor | None, length: int, numbers: torch.Tensor, plan: str
) -> Launches:
    """Return (loss, policy_loss, kl, metrics, divisor) of the sequences whose sums are given."""
    total, fits = _Total(sums.shape[0], sums.shape[1], 1, length, Formula.parse(plan)), sums.is_contiguous()

    def launch(
        sums: torch.Tensor, normalizer: torch.Tensor | None, length: int, numbers: torch.Tensor, plan: str
    ) -> tuple[torch.Tensor, ...]:
        results, arguments = total.prepare(readable(sums, fits), normalizer, numbers.tolist())
        with device_of(sums):
            total.launch(*arguments)
        return results

    return launch


@prepared
def backward(
    current_logps: torch.Tensor, divisor: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor
) -> Launches:
    """Return the gradient in the dtype of current_logps; 0 at masked positions for any upstream gradient."""
    size, scale, fits = slope.numel(), _scale(slope), slope.is_contiguous()

    def launch(
        current_logps: torch.Tensor, divisor: torch.Tensor, slope: torch.Tensor, upstream: torch.Tensor
    ) -> torch.Tensor:
        grad = current_logps.new_empty(*current_logps.shape)
        if size:
            with device_of(grad):
                scale(readable(slope, fits), divisor, upstream, grad)
        return grad

    return launch


@prepared
def backward_inplace(slope: torch.Tensor, divisor: torch.Tensor, upstream: torch.Tensor) -> Launches:
    """Write the gradient, as ``backward`` returns it in FP32, over a contiguous slope."""
    size, scale = slope.numel(), _scale(slope)

    def launch(slope: torch.Tensor, divisor: torch.Tensor, upstream: torch.Tensor) -> None:
        if size:
            with device_of(slope):
                scale(slope, divisor, upstream, slope)

    return launch


def _scale(slope: torch.Tensor) -> Launch:
    size = slope.numel()
    return Launch(gradient, (ceil_div(size, GRADIENT_BLOCK),), (size, GRADIENT_BLOCK), num_warps=GRADIENT_WARPS)


def _prepare_loss(*arguments: Any, has_slope: bool, has_total: bool) -> Launches:
    """Return the launches of a loss.

    Their result is (loss, policy_loss, kl, metrics, divisor, slope), without the last two unless ``has_slope``; or,
    unless ``has_total``, the sums of each sequence ``[3 or 14, B]``, with the slope if ``has_slope``.
    """
    call = LossCall(*arguments)
    scores, segments = scores_of_call(call), max(ceil_div(call.length, SEGMENT), 1)
    places, copied, strides = _operands(call, scores)
    shape = segments, SUMS + (len(METRICS) if call.with_metrics else 0), call.batch
    packed = 0 if call.cu_seqlens is None else call.current_logps.shape[0]
    sizes = (call.length, packed, call.batch, segments, scores.groups, *strides)
    segment_terms, total = _terms(call, scores, segments), _Total(*shape[1:], segments, call.length, call.formula)
    is_expanded = call.advantages is not None and scores.values.ndim < call.advantages.ndim

    def launch(*arguments: Any) -> Any:
        current, numbers = arguments[0], arguments[NUMBERS].tolist()
        low, high, beta, eps, *bounds, _, _ = numbers
        tensors = [arguments[place] for place in places]
        if is_expanded:
            tensors[SCORES] = tensors[SCORES][:, 0]
        for number in copied:
            tensors[number] = readable(tensors[number], False)
        sums = current.new_empty(*shape, dtype=torch.float32)
        slope = current.new_empty(*current.shape, dtype=torch.float32) if has_slope else None
        with device_of(current):
            if shape[2]:
                segment_terms(*tensors, sums, slope, *sizes, 1 - low, 1 + high, beta, *bounds, eps)
            if has_total:
                results, last = total.prepare(sums, arguments[NORMALIZER], numbers)
                total.launch(*last)
                return (*results, slope) if has_slope else results[:-1]
            added = _add_segments(sums)
            return (added, slope) if has_slope else added

    return launch


forward = prepared(partial(_prepare_loss, has_slope=False, has_total=True))
forward_grad = prepared(partial(_prepare_loss, has_slope=True, has_total=True))
sums = prepared(partial(_prepare_loss, has_slope=False, has_total=False))
sums_grad = prepared(partial(_prepare_loss, has_slope=True, has_total=False))


def _operands(call: LossCall, scores: Scores) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how the kernel of terms reads the tensors of a call.

    Their places among the arguments of the raw op; numbers of those that are copied first, because their layout cannot
    be read; strides of their rows.
    """
    scored = "advantages" if call.rewards is None else "rewards"
    names = (*TOKENS, scored, "rollout_ratio", "entropy", "boundaries", "cu_seqlens")
    tensors = [getattr(call, name) for name in names]
    tensors[SCORES] = scores.values
    fits = [x is None or _fits(x) for x in tensors]
    # Scores, one for each sequence, are read with any stride.
    fits[SCORES] |= scores.values.ndim == 1
    return (
        tuple(LossCall._fields.index(name) for name in names),
        tuple(number for number, is_read in enumerate(fits) if not is_read),
        tuple(
            0 if x is None else x.stride(0) if is_read else _packed_stride(x)
            for x, is_read in zip(tensors[:ROWS], fits, strict=False)
        ),
    )


def _fits(x: torch.Tensor) -> bool:
    """Return whether rows are contiguous; packed tokens and numbers of sequences have no stride."""
    return x.stride(1) == 1 if x.ndim == 2 else x.is_contiguous()


def _packed_stride(x: torch.Tensor) -> int:
    """Return the stride of rows of a contiguous copy."""
    return max(x.shape[1], 1) if x.ndim == 2 else 1


def _terms(call: LossCall, scores: Scores, segments: int) -> Launch:
    formula, w = call.formula, call.rollout_ratio
    by_sequence = formula.level == "sequence" or formula.kind == "vespo"
    lanes = lanes_for(min(max(call.length, 1), SEGMENT), FEWEST, WIDE if by_sequence else LANES)
    is_whole = by_sequence and lanes >= call.length
    per_token, w_per_token = scores.values.ndim == 2, w is not None and w.ndim == 2
    fits_one_warp = is_whole and not call.with_metrics and not w_per_token
    share = (NARROW if fits_one_warp else SHARE) if by_sequence else FEWEST
    constants = (
        *(SEGMENT, lanes, scores.lanes, scores.one_step, *scores.formula, per_token, w_per_token),
        *(formula.kind, formula.level == "sequence", formula.mean == "sequences", formula.bounds, formula.rollout),
        *(formula.kl, formula.kl_correction == "corrected", call.with_metrics, is_whole),
    )
    return Launch(terms, (call.batch * segments,), constants, num_warps=max(lanes // share, 1))


class _Total:
    """The launch that adds the sums of sequences: (loss, policy_loss, kl, metrics, divisor)."""

    def __init__(self, quantities: int, batch: int, segments: int, length: int, formula: Formula) -> None:
        self._metrics, self._sizes = quantities - SUMS, (batch, segments)
        # Of the sums over the batch, 0 for the active tokens; a call may give another one, and a length.
        self._divisor = 0.0 if formula.mean == "tokens" else float(max(batch, 1))
        self._length = float(max(length, 1)) if formula.mean == "sums" else 0.0
        constants = (formula.mean == "sequences", quantities, LANES)
        self.launch = Launch(reduce, (1 + self._metrics,), constants, num_warps=WARPS)

    def prepare(
        self, sums: torch.Tensor, normalizer: torch.Tensor | None, numbers: list[float]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """Return the results, which ``launch`` writes, and its arguments."""
        _, _, beta, *_, divisor, length = numbers
        loss = sums.new_empty(())
        # Faster than new_empty.
        policy_loss, kl, count = [torch.empty_like(loss) for _ in range(3)]
        metrics = sums.new_empty(self._metrics)
        out = loss, policy_loss, kl, metrics if self._metrics else None, count
        factor = (length or self._length) if self._length else 1.0
        arguments = sums, *out, normalizer, *self._sizes, beta, divisor or self._divisor, factor
        return (loss, policy_loss, kl, metrics, count), arguments


def _add_segments(sums: torch.Tensor) -> torch.Tensor:
    """Add the segments of each sequence in ascending order; return its sums, ``[quantities, B]``."""
    if sums.shape[0] == 1:
        return sums[0]
    total = sums.new_zeros(sums.shape[1:])
    for segment in sums:
        total = total + segment
    if sums.shape[1] > SUMS:
        least, most = SUMS + LEAST.value, SUMS + MOST.value
        total[least], total[most] = sums[:, least].amin(0), sums[:, most].amax(0)
    return total
