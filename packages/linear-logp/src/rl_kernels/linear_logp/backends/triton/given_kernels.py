"""Log-probabilities from given logits, with the bits of ``kernels``, which computes logits and log-probabilities.

Triton adds a row of a tile in an order that follows from which thread holds what. So a tile is added to a product of
zeros first: it then lies in the registers as the product of ``kernels`` does, and its sums have the same order. Blocks
of a unit are merged in ascending order, then units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib import gemm_kernels, softmax
from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.linear_logp.backends.triton.kernels import BLOCK, ROWS, UNIT


@triton.jit(do_not_specialize=["N", "V", "row_stride"])
def given_states(
    logits,
    zeros,
    temperature,
    smallest,
    all_parts,
    kept_parts,
    N,
    V,
    row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the states of BLOCK_M rows over a unit: of all logits, and of those from ``smallest[N]`` on.

    Grid: tiles of rows, units. ``zeros[BLOCK_K]`` are zeros of the dtype of the operands.
    """
    rows, first = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * UNIT
    here, inner = rows < N, tl.arange(0, BLOCK_K)
    c = softmax.inverse(temperature, rows, here, True) * softmax.LOG2E
    least = tl.load(smallest + rows, mask=here, other=0.0)
    left = tl.load(zeros + tl.zeros((BLOCK_M, 1), tl.int32) + inner[None, :])
    right = tl.load(zeros + tl.zeros((BLOCK, 1), tl.int32) + inner[None, :])
    total, weighted, kept_total = tl.zeros_like(c), tl.zeros_like(c), tl.zeros_like(c)
    top, kept_top = total + float("-inf"), total + float("-inf")
    for start in tl.range(first, tl.minimum(first + UNIT, V), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        place = logits + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
        x = tl.load(place, mask=here[:, None] & (columns < V)[None, :], other=float("-inf"))
        x = gemm_kernels.step(left, right, x)
        one_top, one_total, _ = softmax.rows_state(x, c, False)
        top, total, _ = softmax.merge(top, total, weighted, one_top, one_total, weighted, c, False)
        x = tl.where(x >= least[:, None], x, float("-inf"))
        one_top, one_total, _ = softmax.rows_state(x, c, False)
        kept_top, kept_total, _ = softmax.merge(kept_top, kept_total, weighted, one_top, one_total, weighted, c, False)
    softmax.store_part(all_parts, tl.program_id(1), N, rows, here, top, total, weighted, False)
    softmax.store_part(kept_parts, tl.program_id(1), N, rows, here, kept_top, kept_total, weighted, False)


@triton.jit
def _logp(parts, units, N, rows, here, x, inv):
    c = inv * softmax.LOG2E
    top, total, weighted = softmax.merge_parts(parts, 0, units, N, rows, here, c, False)
    top, log_total, _, _ = softmax.finish(top, total, weighted, inv)
    log_p = fma(x - top, inv, -log_total)
    return tl.where(log_p > 0.0, 0.0, log_p)


@triton.jit(do_not_specialize=["N", "units", "row_stride"])
def given_logp(logits, temperature, ids, all_parts, kept_parts, logp, kept_logp, N, units, row_stride):
    """Merge the units of ROWS rows in ascending order, and write both log-probabilities. Grid: tiles of rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < N
    inv = softmax.inverse(temperature, rows, here, True)
    id = tl.load(ids + rows, mask=here, other=0)
    x = tl.load(logits + rows.to(tl.int64) * row_stride + id, mask=here, other=0.0)
    tl.store(logp + rows, _logp(all_parts, units, N, rows, here, x, inv), mask=here)
    tl.store(kept_logp + rows, _logp(kept_parts, units, N, rows, here, x, inv), mask=here)
