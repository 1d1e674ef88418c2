"""The objectives in Triton other than the loss of ``plain``: the same number of launches, the same kind of sums.

One program computes one segment of a sequence. Values of the whole sequence (its number of tokens, its ratio, the slope
that its tokens share) are recomputed by each of its programs, in passes over the sequence before its own segment. These
passes also add segments in ascending order. Objectives whose passes sum log-probabilities use up to 1024 lanes, in the
passes and after them: sequences of up to 1024 tokens stay in registers, longer ones are read from memory once and then
from the cache. All other objectives use 256 lanes. A policy term that all tokens of a sequence share is multiplied by
their number instead of summed, and a KL weighted by the ratio of the sequence is multiplied by it after the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.constants import TOKEN_SEGMENT as SEGMENT
from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import launch
from rl_kernels.grpo_loss.backends.triton.groups import LANES, Scores, lanes_for
from rl_kernels.grpo_loss.backends.triton.kernels import terms
from rl_kernels.grpo_loss.backends.triton.plain import rows_of
from rl_kernels.grpo_loss.backends.triton.reduce import reduce
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.outputs import METRICS
from rl_kernels.grpo_loss.plan import Formula, Numbers

WARP = 128
"""Lanes of one warp."""
WIDE = 1024
"""Largest number of lanes for objectives with a pass over each sequence before its terms: so many that few sequences
run at once, and the second read hits the cache."""
SHARE, NARROW = 256, 1024
"""Lanes per warp for these objectives: in general, and where one warp keeps a whole sequence in registers."""
REDUCE_WARPS = 4
KINDS = {"clip": 0, "sapo": 1, "cispo": 2, "vespo": 3, "reinforce": 4}
BOUNDS = {"none": 0, "delta": 1, "dual": 2}
MODES = {"given": 0, "truncate": 1, "mask": 2}
SUMS = 3
"""Sums that a program writes: policy, KL, count; one per metric follows."""


class Results(NamedTuple):
    """The tensors that the last launch of the forward pass writes."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor
    metrics: torch.Tensor
    divisor: torch.Tensor


def loss_of(call: LossCall, scores: Scores, slope: torch.Tensor | None) -> Results:
    """Return the results; write ``slope`` unless it is None."""
    sums = segment_sums(call, scores, slope)
    return results_of(sums, call.normalizer, call.length, call.values, call.formula)


def segment_sums(call: LossCall, scores: Scores, slope: torch.Tensor | None) -> torch.Tensor:
    """Return the sums of each segment, ``[segments, 3 or 14, B]``; write ``slope`` unless it is None."""
    segments = max(-(-call.length // SEGMENT), 1)
    quantities = SUMS + (len(METRICS) if call.with_metrics else 0)
    current = call.current_logps
    sums = torch.empty((segments, quantities, call.batch), dtype=torch.float32, device=current.device)
    if call.batch:
        with device_of(current):
            _launch_terms(call, scores, slope, sums, call.formula, call.values, segments)
    return sums


def results_of(
    sums: torch.Tensor, normalizer: torch.Tensor | None, length: int, n: Numbers, formula: Formula
) -> Results:
    """Return the results of sequences of up to ``length`` tokens whose ``sums`` are given."""
    segments, quantities, batch = sums.shape
    metrics = sums.new_empty(quantities - SUMS)
    loss, policy_loss, kl, divided = (sums.new_empty(()) for _ in range(4))
    results = Results(loss, policy_loss, kl, metrics, divided)
    with device_of(sums):
        divisor = n.divisor or (0.0 if formula.mean == "tokens" else float(max(batch, 1)))
        factor = float(n.length or max(length, 1)) if formula.mean == "sums" else 1.0
        launch(
            reduce,
            (1 + len(metrics),),
            *(sums, *results[:3], metrics if len(metrics) else None, results.divisor, normalizer),
            *(batch, segments, n.beta, float(divisor), factor),
            *(formula.mean == "sequences", quantities, LANES),
            num_warps=REDUCE_WARPS,
        )
    return results


def _launch_terms(
    call: LossCall,
    scores: Scores,
    slope: torch.Tensor | None,
    sums: torch.Tensor,
    formula: Formula,
    n: Numbers,
    segments: int,
) -> None:
    w, entropy = call.rollout_ratio, call.entropy
    offsets = None if call.cu_seqlens is None else call.cu_seqlens.contiguous()
    total = 0 if offsets is None else call.current_logps.shape[0]
    tensors = [call.current_logps, call.old_logps, call.ref_logps, call.mask, scores.values, w, entropy]
    # Packed tokens and numbers of sequences have no stride in this kernel.
    rows = [rows_of(x) if x is None or x.ndim == 2 else x.contiguous() for x in tensors]
    strides = [0 if x is None else x.stride(0) for x in rows]
    by_sequence = formula.level == "sequence" or formula.kind == "vespo"
    lanes = lanes_for(min(max(call.length, 1), SEGMENT), WARP, WIDE if by_sequence else LANES)
    is_whole = by_sequence and lanes >= call.length
    per_token, w_per_token = scores.values.ndim == 2, w is not None and w.ndim == 2
    fits_one_warp = is_whole and not call.with_metrics and not w_per_token
    share = (NARROW if fits_one_warp else SHARE) if by_sequence else WARP
    # In the order in which the kernel reads them.
    numbers: tuple[float, ...] = (
        1 - n.clip_low,
        1 + n.clip_high,
        n.beta,
        n.delta,
        n.dual_clip,
        n.cispo_floor,
        n.cispo_cap,
    )
    numbers += (n.sapo_temperature_pos, n.sapo_temperature_neg)
    numbers += (n.vespo_k_pos, n.vespo_lambda_pos, n.vespo_k_neg, n.vespo_lambda_neg, n.rollout_min, n.rollout_max)
    launch(
        terms,
        (call.batch * segments,),
        *(*rows, scores.boundaries, offsets, sums, slope, call.length, total, call.batch, segments, scores.groups),
        *(*strides, *map(float, numbers), n.eps),
        *(SEGMENT, lanes, scores.lanes, scores.one_step, *scores.formula),
        *(per_token, w_per_token),
        *(
            KINDS[formula.kind],
            formula.level == "sequence",
            formula.mean == "sequences",
            BOUNDS[formula.bounds],
            MODES[formula.rollout],
        ),
        *(int(formula.kl[1]), formula.kl_correction == "corrected", call.with_metrics, is_whole),
        num_warps=max(lanes // share, 1),
    )
