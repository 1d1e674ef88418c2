"""The metrics of objectives, which the kernel sums along with the terms, in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.groups import tree
from rl_kernels.grpo_loss.backends.triton.terms import CISPO, CLIP, k3_of


@triton.jit
def no_metrics(LANES: tl.constexpr):
    """Return the initial lanes of each metric."""
    below, above, nonfinite = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    ratios, squares = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    k1, k2 = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    k3, entropies = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    least, most = tl.full((LANES,), float("inf"), tl.float32), tl.full((LANES,), float("-inf"), tl.float32)
    return below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most


@triton.jit
def add_metrics(lanes, token, ratio, e, entropy, columns, here, n, KIND: tl.constexpr, HAS_REF: tl.constexpr):
    """Return the lanes with one more token each: its ratio, e = ref - current, entropy; a masked one changes nothing.

    The squares of the ratios are stored in the place of the effective samples.
    """
    below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most = lanes
    x, old_x, ref_x, is_active, a, _ = token
    low, high, floor, cap = n[0], n[1], n[5], n[6]
    if KIND == CISPO:
        below += (is_active & (ratio < floor)).to(tl.int32)
        above += (is_active & (ratio > cap)).to(tl.int32)
    elif KIND == CLIP:
        below += (is_active & (ratio < low) & (a.to(tl.float32) < 0.0)).to(tl.int32)
        above += (is_active & (ratio > high) & (a.to(tl.float32) > 0.0)).to(tl.int32)
    is_finite = tl.abs(x.to(tl.float32)) < float("inf")
    is_finite &= tl.abs(old_x.to(tl.float32)) < float("inf")
    is_finite &= tl.abs(ref_x.to(tl.float32)) < float("inf")
    nonfinite += (is_active & ~is_finite).to(tl.int32)
    shown = tl.where(is_active, ratio, 0.0)
    ratios += shown
    squares = fma(shown, shown, squares)
    if HAS_REF:
        k1 -= e
        k2 = fma(e, 0.5 * e, k2)
        exact, _ = k3_of(e)
        k3 += exact
    if entropy is not None:
        h = tl.load(entropy + columns, mask=here, other=0.0).to(tl.float32)
        entropies += tl.where(is_active, h, 0.0)
    # Ratios of NaN are left out: no comparison with NaN is true.
    least = tl.where(is_active & (ratio < least), ratio, least)
    most = tl.where(is_active & (ratio > most), ratio, most)
    return below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most


@triton.jit
def store_metrics(place, batch, lanes):
    """Store the sum, minimum or maximum of each metric's lanes, in the order of ``METRICS``, with stride ``batch``."""
    below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most = lanes
    tl.store(place, tl.sum(below, 0).to(tl.float32))
    tl.store(place + batch, tl.sum(above, 0).to(tl.float32))
    tl.store(place + 2 * batch, tree(ratios))
    tl.store(place + 3 * batch, tl.min(least, 0))
    tl.store(place + 4 * batch, tl.max(most, 0))
    tl.store(place + 5 * batch, tree(k1))
    tl.store(place + 6 * batch, tree(k2))
    tl.store(place + 7 * batch, tree(k3))
    tl.store(place + 8 * batch, tree(squares))
    tl.store(place + 9 * batch, tl.sum(nonfinite, 0).to(tl.float32))
    tl.store(place + 10 * batch, tree(entropies))
