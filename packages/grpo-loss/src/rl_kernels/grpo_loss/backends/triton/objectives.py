"""Every objective in Triton, beyond the loss of ``plain``: as many launches, and sums of the same kind.

One program a segment of a sequence. What a whole sequence decides (its number of tokens, its ratio, the slope that its
tokens share) each of its programs works out anew, in passes over the sequence before its own segment. Segments are
added in ascending order in these too. Objectives of which such a pass sums log-probabilities have up to 1024 lanes, in
that pass and after it: of a sequence that is no longer all tokens stay in registers, those of a longer one are read
from memory once and then from the cache. All others have 256. A policy term that all tokens of a sequence share is not
summed but multiplied by their number, and a KL weighted by the ratio of the sequence is multiplied after it is summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import launch
from rl_kernels.grpo_loss.backends.triton.groups import LANES, Scores, lanes_for
from rl_kernels.grpo_loss.backends.triton.kernels import terms
from rl_kernels.grpo_loss.backends.triton.reduce import reduce
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.outputs import METRICS
from rl_kernels.grpo_loss.plan import Numbers, Plan

SEGMENT = 4096
"""Tokens of a sequence whose sum is formed at a time."""
WARP = 128
"""Lanes of one warp."""
WIDE = 1024
"""Most lanes of the sums of objectives with a pass over each sequence before its terms: so few sequences are at work at
a time that the second reading finds them in the cache."""
SHARE, NARROW = 256, 1024
"""Lanes of one warp there; and where one warp holds a whole sequence in its registers."""
REDUCE_WARPS = 4
KINDS = {"clip": 0, "sapo": 1, "cispo": 2, "vespo": 3, "reinforce": 4}
BOUNDS = {"none": 0, "delta": 1, "dual": 2}
MODES = {"given": 0, "truncate": 1, "mask": 2}
SUMS = 3
"""Numbers that a program leaves: policy, KL, count; then one for each metric."""


class Results(NamedTuple):
    """What the last sum writes."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    kl: torch.Tensor
    metrics: torch.Tensor
    divisor: torch.Tensor


def loss_of(call: LossCall, scores: Scores, slope: torch.Tensor | None) -> Results:
    """Return the results and write the slope, if it is wanted."""
    plan, n, batch, length = call.formula, call.values, call.batch, call.length
    segments = max(-(-length // SEGMENT), 1)
    quantities = SUMS + (len(METRICS) if call.with_metrics else 0)
    current = call.current_logps
    sums = torch.empty((segments, quantities, batch), dtype=torch.float32, device=current.device)
    metrics = sums.new_empty(len(METRICS) if call.with_metrics else 0)
    loss, policy_loss, kl, divided = (sums.new_empty(()) for _ in range(4))
    results = Results(loss, policy_loss, kl, metrics, divided)
    with device_of(current):
        if batch:
            _launch_terms(call, scores, slope, sums, plan, n, segments)
        divisor = n.divisor or (0.0 if plan.mean == "tokens" else float(max(batch, 1)))
        factor = float(n.length or max(length, 1)) if plan.mean == "sums" else 1.0
        launch(
            reduce,
            (1 + len(metrics),),
            *(sums, *results[:3], metrics if call.with_metrics else None, results.divisor, call.normaliser),
            *(batch, segments, n.beta, float(divisor), factor),
            *(plan.mean == "sequences", quantities, LANES),
            num_warps=REDUCE_WARPS,
        )
    return results


def _launch_terms(
    call: LossCall,
    scores: Scores,
    slope: torch.Tensor | None,
    sums: torch.Tensor,
    plan: Plan,
    n: Numbers,
    segments: int,
) -> None:
    w, entropy = call.rollout_ratio, call.entropy
    offsets = None if call.cu_seqlens is None else call.cu_seqlens.contiguous()
    total = 0 if offsets is None else call.current_logps.shape[0]
    tensors = [call.current_logps, call.old_logps, call.ref_logps, call.mask, scores.values, w, entropy]
    rows = [_rows(x) for x in tensors]
    strides = [0 if x is None else x.stride(0) for x in rows]
    by_sequence = plan.level == "sequence" or plan.kind == "vespo"
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
            KINDS[plan.kind],
            plan.level == "sequence",
            plan.mean == "sequences",
            BOUNDS[plan.bounds],
            MODES[plan.rollout],
        ),
        *(int(plan.kl[1]), plan.kl_correction == "corrected", call.with_metrics, is_whole),
        num_warps=max(lanes // share, 1),
    )


def _rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor whose rows lie in one piece; of packed tokens and of one value a row, any stride is not one."""
    if x is None or x.ndim == 2:
        return x if x is None or x.stride(1) == 1 else x.contiguous()
    return x.contiguous()
