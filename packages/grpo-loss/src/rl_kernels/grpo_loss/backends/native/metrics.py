"""The metrics of a loss in PyTorch, from values that its terms already use; summed in the order of the loss."""

from __future__ import annotations

import math

import torch

from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.grpo_loss.backends.native.terms import Block, Terms, _k3, keep, lanes
from rl_kernels.grpo_loss.call import Formula, Numbers
from rl_kernels.grpo_loss.outputs import METRICS

SUMS = ("clip_low", "clip_high", "ratio", "squares", "k1", "k2", "k3", "nonfinite", "entropy")
QUANTITIES = len(SUMS) + 2
"""Rows of metrics: the sums, then the smallest and the largest ratio."""


def of_block(block: Block, terms: Terms, formula: Formula, n: Numbers) -> torch.Tensor:
    """Return the metrics of some sequences, ``[QUANTITIES, b]``."""
    rows = terms.counts.new_zeros((QUANTITIES, len(terms.counts)))
    dtype = rows.dtype
    active = lanes(block.mask, dtype)
    ratio = terms.ratio.expand(block.mask.shape).contiguous()
    values = {"ratio": ratio, "squares": ratio * ratio}
    values["clip_low"], values["clip_high"] = (x.to(dtype) for x in _clipped(ratio, block, formula, n))
    values["nonfinite"] = (~_finite(block)).to(dtype)
    if terms.e is not None:
        values |= {"k1": -terms.e, "k2": terms.e * terms.e * 0.5, "k3": _k3(terms.e)[0]}
    if block.entropy is not None:
        values["entropy"] = block.entropy.to(dtype)
    for name, value in values.items():
        rows[SUMS.index(name)] = row_sum(keep(value, active))
    rows[-2], rows[-1] = math.inf, -math.inf
    if ratio.shape[1]:
        is_number = block.mask & ~ratio.isnan()
        rows[-2] = torch.where(is_number, ratio, math.inf).amin(1)
        rows[-1] = torch.where(is_number, ratio, -math.inf).amax(1)
    return rows


def vector(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the metrics of ``rows[QUANTITIES, B]``; 0 if their tensor was not given or no token is active.

    ``counts[B]`` are the active tokens of each sequence.
    """
    sums = dict(zip(SUMS, row_sum(rows[:-2]), strict=True))
    number = row_sum(counts)
    means = {name: value / number.clamp(min=1) for name, value in sums.items()}
    is_any = number > 0
    infinity = rows.new_full((1,), math.inf)
    named = {
        **{name: means[name] for name in ("clip_low", "clip_high", "k1", "k2", "k3", "entropy")},
        "ratio_mean": means["ratio"],
        "ratio_min": torch.where(is_any, torch.cat((rows[-2], infinity)).amin(), 0.0),
        "ratio_max": torch.where(is_any, torch.cat((rows[-1], -infinity)).amax(), 0.0),
        # Without a token, and where all squares underflow, it is 0 / 1.
        "effective_samples": sums["ratio"].square() / torch.where(sums["squares"] == 0, 1.0, sums["squares"]),
        "nonfinite": sums["nonfinite"],
    }
    return torch.stack([named[name] for name in METRICS]).float()


def _clipped(ratio: torch.Tensor, block: Block, formula: Formula, n: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of the tokens whose ratio is clipped at the lower bound, and at the upper bound."""
    a = block.advantages if block.advantages.ndim == 2 else block.advantages[:, None]
    if formula.kind == "cispo":
        return ratio < n.cispo_floor, ratio > n.cispo_cap
    if formula.kind != "clip":
        return torch.zeros_like(ratio, dtype=torch.bool), torch.zeros_like(ratio, dtype=torch.bool)
    return (ratio < 1 - n.clip_low) & (a < 0), (ratio > 1 + n.clip_high) & (a > 0)


def _finite(block: Block) -> torch.Tensor:
    finite = block.current.isfinite()
    for other in (block.old, block.ref):
        if other is not None:
            finite = finite & other.isfinite()
    return finite
