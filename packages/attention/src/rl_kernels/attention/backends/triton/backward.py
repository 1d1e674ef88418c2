"""Functions shared by the kernel of dq and that of dk and dv; both recompute the weights from the scores and lse.

A sum over keys (dq) or over rows (dk, dv) is one chain in ascending order; a block that adds nothing does not change
it. The delta of a row is the sum of out times its gradient, by Triton's reduction over the columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.attention.backends.triton.loads import UNIT, load_rows
from rl_kernels.attention.backends.triton.tiles import LOG2E
from rl_kernels.core.triton_lib.arithmetic import fma, product
from rl_kernels.core.triton_lib.softcap import slope


@triton.jit(do_not_specialize=("queries", "g_batch"))
def rows_of(
    OUT, GRAD, LSE, LSES, DELTAS, queries, g_batch,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr,
    G_STEP: tl.constexpr, G_HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write two numbers for each row: ``LSES``, its lse in base 2, and ``DELTAS``, the sum of out times its gradient.

    Both are ``[B, KV_HEADS, queries, GROUP]``; an lse is inf where a row sees nothing, which makes its weights 0. Grid:
    sequences x tiles of queries x heads.
    """
    # In 64 bits: packed sequences may have more rows together than 32 bits count.
    tiles = ((tl.full((), queries, tl.int64) * HEADS + ROWS - 1) // ROWS).to(tl.int32)
    b, program = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    rows = program * ROWS + tl.arange(0, ROWS)
    t, head = rows // HEADS, rows % HEADS
    inside = t < queries
    out = load_rows(OUT, ((b * queries + t) * HEADS + head) * DV, inside, DV, WIDTH_V)
    offsets = b * g_batch * UNIT + t * (G_STEP * UNIT) + head * (G_HEAD * UNIT)
    grad = load_rows(GRAD, offsets, inside, DV, WIDTH_V)
    delta = tl.sum(product(out.to(tl.float32), grad.to(tl.float32)), 1)
    lse = tl.load(LSE + (b * HEADS + head) * queries + t, mask=inside, other=0.0)
    scaled = product(lse, tl.full(lse.shape, LOG2E, tl.float32))
    place = ((b * (HEADS // GROUP) + head // GROUP) * queries + t) * GROUP + head % GROUP
    tl.store(LSES + place, tl.where(lse == float("-inf"), float("inf"), scaled), mask=inside)
    tl.store(DELTAS + place, delta, mask=inside)


@triton.jit
def weights_of(score, lse, factor):
    """Return ``2^(score factor - lse)``; lse is in base 2 and broadcasts to score."""
    return tl.exp2(fma(score, tl.full(score.shape, factor, tl.float32), tl.broadcast_to(-lse, score.shape)))


@triton.jit
def dscores_of(score, weights, dweights, delta, cap, CAPPED: tl.constexpr):
    """Return the gradient with respect to the scores before the cap."""
    dscore = product(weights, dweights - delta)
    if CAPPED:
        dscore = product(dscore, slope(score, cap, 1.0 / cap))
    return dscore
