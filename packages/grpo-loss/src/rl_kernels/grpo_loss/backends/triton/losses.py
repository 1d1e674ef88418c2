"""The launches of the forward pass, prepared for calls of one kind: the terms of all tokens, and their sum.

The plain loss, clipped token by token and averaged over tokens, has kernels of its own (``plain``). All other
objectives take the same number of launches and the same kind of sums (``kernels``, ``reduce``). One program computes
one segment of a sequence. Values of the whole sequence (its number of tokens, its ratio, the slope that its tokens
share) are recomputed by each of its programs, in passes over the sequence before its own segment. These passes also add
segments in ascending order. Objectives whose passes sum log-probabilities use up to 1024 lanes, in the passes and after
them: sequences of up to 1024 tokens stay in registers, longer ones are read from memory once and then from the cache.
All other objectives use 256 lanes. A policy term that all tokens of a sequence share is multiplied by their number
instead of summed, and a KL weighted by the ratio of the sequence is multiplied by it after the sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches
from rl_kernels.core.constants import TOKEN_SEGMENT as SEGMENT
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.grpo_loss.backends.triton.groups import LANES, Scores, lanes_for, scores_of_call
from rl_kernels.grpo_loss.backends.triton.kernels import terms
from rl_kernels.grpo_loss.backends.triton.plain import plain_sum, plain_terms
from rl_kernels.grpo_loss.backends.triton.reduce import FIRST_METRIC, LEAST, MOST, reduce
from rl_kernels.grpo_loss.call import Formula, LossCall
from rl_kernels.grpo_loss.outputs import METRICS

WARP = 128
"""Lanes of one warp: in the plain loss four tokens to a thread, which is one 16-byte load in FP32."""
WIDE = 1024
"""Largest number of lanes for objectives with a pass over each sequence before its terms: so many that few sequences
run at once, and the second read hits the cache."""
SHARE, NARROW = 256, 1024
"""Lanes per warp for these objectives: in general, and where one warp keeps a whole sequence in registers."""
REDUCE_WARPS = 4
"""Warps of the program that adds all sequences; the order is explicit, so they change no bit."""
KINDS = {"clip": 0, "sapo": 1, "cispo": 2, "vespo": 3, "reinforce": 4}
BOUNDS = {"none": 0, "delta": 1, "dual": 2}
MODES = {"given": 0, "truncate": 1, "mask": 2}
SUMS = 3
"""Sums that a program writes: policy, KL, count; one per metric follows."""
TOKENS = ("current_logps", "old_logps", "ref_logps", "mask")
"""The first operands of a kernel of terms; the scores follow, at SCORES."""
SCORES = len(TOKENS)
NUMBERS, NORMALIZER = LossCall._fields.index("numbers"), LossCall._fields.index("normalizer")


class Operands(NamedTuple):
    """How a kernel of terms reads the tensors of a call.

    Attributes:
        places: their places among the arguments of the raw op.
        copied: numbers of those that are copied first, because their layout cannot be read.
        strides: of their rows.
    """

    places: tuple[int, ...]
    copied: tuple[int, ...]
    strides: tuple[int, ...]


def prepare_loss(call: LossCall, *, has_slope: bool, has_total: bool) -> Launches:
    """Return the launches of a loss.

    Their result is (loss, policy_loss, kl, metrics, divisor, slope), without the last two unless ``has_slope``; or,
    unless ``has_total``, the sums of each sequence ``[3 or 14, B]``, with the slope if ``has_slope``.
    """
    batch, length, formula, scores = call.batch, call.length, call.formula, scores_of_call(call)
    is_plain = _is_plain(call)
    operands = _operands(call, scores, is_plain)
    # The plain loss has no segment without tokens.
    segments = max(ceil_div(length, SEGMENT), 0 if is_plain else 1)
    shape = segments, SUMS + (len(METRICS) if call.with_metrics else 0), batch
    make_terms = _plain_terms if is_plain else _terms
    sizes, segment_terms = make_terms(call, scores, operands, segments)
    total = _plain_total(call) if is_plain else _total(shape[1], formula)
    has_terms = batch > 0 and segments > 0
    # Without a reference, the kernel of the plain loss writes no KL.
    is_zeroed = is_plain and not has_total
    is_expanded = call.advantages is not None and scores.values.ndim < call.advantages.ndim

    def launch(*arguments: Any) -> Any:
        current = arguments[0]
        low, high, beta, eps, *others, divisor, factor = arguments[NUMBERS].tolist()
        tensors = [arguments[place] for place in operands.places]
        if is_expanded:
            tensors[SCORES] = tensors[SCORES][:, 0]
        for number in operands.copied:
            tensors[number] = readable(tensors[number], False)
        sums = current.new_empty(shape, dtype=torch.float32)
        if is_zeroed:
            sums.zero_()
        slope = current.new_empty(current.shape, dtype=torch.float32) if has_slope else None
        with device_of(current):
            if has_terms:
                bounds = () if is_plain else others
                segment_terms(*tensors, sums, slope, *sizes, 1 - low, 1 + high, beta, *bounds, eps)
            if not has_total:
                added = _add_segments(sums)
                return (added, slope) if has_slope else added
            loss, policy_loss, kl, count = [sums.new_empty(()) for _ in range(4)]
            metrics = sums.new_empty(shape[1] - SUMS)
            if is_plain:
                total(sums, loss, policy_loss, kl, count, batch, segments, beta)
            else:
                out = loss, policy_loss, kl, metrics if len(metrics) else None, count
                divided = divisors(formula, divisor, factor, batch, length)
                total(sums, *out, arguments[NORMALIZER], batch, segments, beta, *divided)
        results = loss, policy_loss, kl, metrics
        return (*results, count, slope) if has_slope else results

    return launch


def prepare_total(sums: torch.Tensor, length: int, formula: Formula) -> Launches:
    """Return the launch that adds the sums of sequences: (loss, policy_loss, kl, metrics, divisor)."""
    quantities, batch = sums.shape
    total, fits = _total(quantities, formula), sums.is_contiguous()

    def launch(sums: torch.Tensor, normalizer: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, ...]:
        _, _, beta, *_, divisor, factor = rest[1].tolist()
        loss, policy_loss, kl, count = [sums.new_empty(()) for _ in range(4)]
        metrics = sums.new_empty(quantities - SUMS)
        out = loss, policy_loss, kl, metrics if len(metrics) else None, count
        divided = divisors(formula, divisor, factor, batch, length)
        with device_of(sums):
            total(readable(sums, fits), *out, normalizer, batch, 1, beta, *divided)
        return loss, policy_loss, kl, metrics, count

    return launch


def divisors(formula: Formula, divisor: float, factor: float, batch: int, length: int) -> tuple[float, float]:
    """Return the divisor of the sums over the batch, 0 for the active tokens, and a factor of it."""
    divisor = divisor or (0.0 if formula.mean == "tokens" else float(max(batch, 1)))
    return divisor, float(factor or max(length, 1)) if formula.mean == "sums" else 1.0


def _is_plain(call: LossCall) -> bool:
    extra_inputs = (call.rollout_ratio, call.normalizer, call.cu_seqlens)
    return call.plan == Formula().text and all(x is None for x in extra_inputs) and not call.with_metrics


def _operands(call: LossCall, scores: Scores, is_plain: bool) -> Operands:
    names = [*TOKENS, "advantages" if call.rewards is None else "rewards"]
    names += ["boundaries"] if is_plain else ["rollout_ratio", "entropy", "boundaries", "cu_seqlens"]
    tensors = [getattr(call, name) for name in names]
    tensors[SCORES] = scores.values
    # The kernel of the plain loss takes scores of any stride.
    fits = [x is None or _fits(x) or (is_plain and x is scores.values and x.ndim == 1) for x in tensors]
    rows = list(zip(tensors, fits, strict=True))[: SCORES + (1 if is_plain else 3)]
    return Operands(
        tuple(LossCall._fields.index(name) for name in names),
        tuple(number for number, is_read in enumerate(fits) if not is_read),
        tuple(0 if x is None else x.stride(0) if is_read else _packed_stride(x) for x, is_read in rows),
    )


def _fits(x: torch.Tensor) -> bool:
    """Return whether rows are contiguous; packed tokens and numbers of sequences have no stride."""
    return x.stride(1) == 1 if x.ndim == 2 else x.is_contiguous()


def _packed_stride(x: torch.Tensor) -> int:
    """Return the stride of rows of a contiguous copy."""
    return max(x.shape[1], 1) if x.ndim == 2 else 1


def _plain_terms(call: LossCall, scores: Scores, operands: Operands, segments: int) -> tuple[tuple[int, ...], Launch]:
    """Return the sizes that ``plain_terms`` is given, and its launch."""
    batch, length = call.current_logps.shape
    lanes = lanes_for(length, WARP)
    constants = (SEGMENT, lanes, scores.lanes, scores.one_step, *scores.formula, scores.values.ndim == 2)
    launch = Launch(plain_terms, (batch, segments), constants, num_warps=lanes // WARP)
    return (length, scores.groups, *operands.strides), launch


def _plain_total(call: LossCall) -> Launch:
    return Launch(plain_sum, (1,), (call.ref_logps is not None, LANES), num_warps=REDUCE_WARPS)


def _terms(call: LossCall, scores: Scores, operands: Operands, segments: int) -> tuple[tuple[int, ...], Launch]:
    """Return the sizes that ``terms`` is given, and its launch."""
    formula, w = call.formula, call.rollout_ratio
    total = 0 if call.cu_seqlens is None else call.current_logps.shape[0]
    by_sequence = formula.level == "sequence" or formula.kind == "vespo"
    lanes = lanes_for(min(max(call.length, 1), SEGMENT), WARP, WIDE if by_sequence else LANES)
    is_whole = by_sequence and lanes >= call.length
    per_token, w_per_token = scores.values.ndim == 2, w is not None and w.ndim == 2
    fits_one_warp = is_whole and not call.with_metrics and not w_per_token
    share = (NARROW if fits_one_warp else SHARE) if by_sequence else WARP
    constants = (
        *(SEGMENT, lanes, scores.lanes, scores.one_step, *scores.formula, per_token, w_per_token),
        *(KINDS[formula.kind], formula.level == "sequence", formula.mean == "sequences"),
        *(BOUNDS[formula.bounds], MODES[formula.rollout], int(formula.kl[1]), formula.kl_correction == "corrected"),
        *(call.with_metrics, is_whole),
    )
    launch = Launch(terms, (call.batch * segments,), constants, num_warps=max(lanes // share, 1))
    return (call.length, total, call.batch, segments, scores.groups, *operands.strides), launch


def _total(quantities: int, formula: Formula) -> Launch:
    constants = (formula.mean == "sequences", quantities, LANES)
    return Launch(reduce, (1 + quantities - SUMS,), constants, num_warps=REDUCE_WARPS)


def _add_segments(sums: torch.Tensor) -> torch.Tensor:
    """Add the segments of each sequence in ascending order; return its sums, ``[quantities, B]``."""
    if sums.shape[0] == 1:
        return sums[0]
    total = sums.new_zeros(sums.shape[1:])
    for segment in sums:
        total = total + segment
    if sums.shape[1] > SUMS:
        least, most = FIRST_METRIC.value + LEAST.value, FIRST_METRIC.value + MOST.value
        total[least], total[most] = sums[:, least].amin(0), sums[:, most].amax(0)
    return total
