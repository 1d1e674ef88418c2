"""One token of each sequence with a cache: the row that ``scan`` would compute, from the state and the open chunk.

``weigh`` computes what does not depend on columns of the state: the key, its sum of decays, its row of T, and its row
of M. ``decode`` reads the state once, and writes it once in 64 tokens. Row 0 of a product of 16 rows is the key, row 1
the query; a row has the bits that it has among others. Rows that are not there yet are zeros, which change no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import INTERPRETED
from rl_kernels.gated_delta.backends.triton.prepare import faded_inverse
from rl_kernels.gated_delta.triton_lib.tiles import CHUNK, STEP, column_of, dot, minus, row_of, scaled, times, unit

_KEY, _QUERY = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def subtract_rows(start, weights, rows):
    """Return ``start - weights rows``, both ``[1, 64]``: fused multiply-adds, ascending, as FP32 products have them."""
    if INTERPRETED:
        for s in tl.static_range(CHUNK - 1):
            start = minus(start, column_of(weights, s)[:, None], row_of(rows, s)[None, :])
        return start
    else:
        return tl.dot(-weights, rows, start, input_precision="ieee")


@triton.jit
def weigh(
    Q, K, G, BETA, KEYS, SUMS, INVERSE, LENGTHS, UNIT_Q, MIXING, COUNTS, q_batch, q_head, k_batch, k_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write what one token adds to the cache but for its residual, and the token's row of M. Grid: Hv, sequences.

    ``UNIT_Q[B, Hk, D]``; ``MIXING[B, Hv, 64]``; ``COUNTS[B]``: a copy of LENGTHS, which ``decode`` counts on.
    """
    head, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // (HV // HK)
    item, key_item, length = s * HV + head, s * HK + key_head, tl.load(LENGTHS + s)
    t = length & (CHUNK - 1)
    step, d, r = tl.arange(0, STEP), tl.arange(0, D), tl.arange(0, CHUNK)
    dtype = KEYS.dtype.element_ty
    KEYS, SUMS, INVERSE = KEYS + key_item * (CHUNK * D), SUMS + item * CHUNK, INVERSE + item * (CHUNK * CHUNK)
    q = tl.load(Q + s * q_batch + key_head.to(tl.int64) * q_head + d)
    k = tl.load(K + s * k_batch + key_head.to(tl.int64) * k_head + d)
    keys = tl.load(KEYS + r[:, None] * D + d[None, :], mask=(r < t)[:, None], other=0.0)
    square = INVERSE + r[:, None] * CHUNK + r[None, :]
    inverse = tl.load(square, mask=(r < t)[:, None] & (r[None, :] <= r[:, None]), other=0.0)
    sums = tl.load(SUMS + r, mask=r < t, other=0.0)
    total = tl.load(SUMS + t - 1, mask=t > 0, other=0.0) + tl.load(G + item).to(tl.float32)
    beta = tl.load(BETA + item).to(tl.float32)
    if NORMALIZE:
        q = tl.reshape(unit(q[None, :].to(tl.float32)).to(dtype), [D])
        k = tl.reshape(unit(k[None, :].to(tl.float32)).to(dtype), [D])
    if head % (HV // HK) == 0:
        tl.store(KEYS + t * D + d, k)
        tl.store(UNIT_Q + key_item * D + d, q)
        if head == 0:
            tl.store(COUNTS + s, length)
    tl.store(SUMS + t, total)
    keys = tl.where((r == t)[:, None], k[None, :], keys)
    x = tl.where((step == _KEY)[:, None], k[None, :], tl.where((step == _QUERY)[:, None], q[None, :], 0.0).to(dtype))
    products = dot(x, tl.trans(keys), tl.zeros([STEP, CHUNK], tl.float32))
    between = tl.exp(tl.where(r < t, total - sums, 0.0))
    products = times(products, between[None, :])
    system = tl.where(r < t, scaled(row_of(products, _KEY), beta), 0.0)
    row = subtract_rows(tl.where(r == t, beta, 0.0)[None, :], system[None, :], inverse)
    tl.store(INVERSE + t * CHUNK + r[None, :], row)
    inverse = tl.where((r == t)[:, None], row, inverse).to(dtype)
    scores = tl.where((step == _QUERY)[:, None] & (r <= t)[None, :], products, 0.0).to(dtype)
    mixing = dot(scores, inverse, tl.zeros([STEP, CHUNK], tl.float32))
    tl.store(MIXING + item * CHUNK + r, row_of(mixing, _QUERY).to(dtype))


@triton.jit
def close(STATE, KEYS, SUMS, INVERSE, x, grown, columns, D: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr):
    """Add the chunk to the state, from all its residuals."""
    r = tl.arange(0, CHUNK)
    inverse = tl.load(INVERSE + r[:, None] * CHUNK + r[None, :], mask=r[None, :] <= r[:, None], other=0.0)
    faded = tl.trans(faded_inverse(inverse, tl.load(SUMS + r), x.dtype))
    for part in range(0, D // PART):
        d = part * PART + tl.arange(0, PART)
        keys = tl.load(KEYS + r[:, None] * D + d[None, :])
        weights = dot(faded, keys, tl.zeros([CHUNK, PART], tl.float32)).to(x.dtype)
        place = STATE + d[:, None] * DV + columns[None, :]
        tl.store(place, dot(tl.trans(weights), x, scaled(tl.load(place), grown)))


@triton.jit
def decode(
    V, OUT, STATE, KEYS, RESIDUALS, SUMS, INVERSE, LENGTHS, UNIT_Q, MIXING, COUNTS, scale, v_batch, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write the output of one token, value head and WIDTH columns, and the cache. Grid: DV / WIDTH, Hv, sequences."""
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_item, item = s * HK + head // (HV // HK), s * HV + head
    step, d, r, c = tl.arange(0, STEP), tl.arange(0, D), tl.arange(0, CHUNK), part * WIDTH + tl.arange(0, WIDTH)
    is_query = (step == _QUERY)[:, None]
    KEYS, SUMS, STATE = KEYS + key_item * (CHUNK * D), SUMS + item * CHUNK, STATE + item * (D * DV)
    # Loads come first: none is moved up past a barrier.
    factor = tl.load(STATE + d[:, None] * DV + c[None, :]).to(KEYS.dtype.element_ty)
    v = tl.load(V + s * v_batch + head.to(tl.int64) * v_head + c).to(tl.float32)
    mixing = tl.load(MIXING + item * CHUNK + 0 * step[:, None] + r[None, :], mask=is_query, other=0.0)
    query = tl.load(UNIT_Q + key_item * D + 0 * step[:, None] + d[None, :], mask=is_query, other=0.0)
    length = tl.load(COUNTS + s)
    t = length & (CHUNK - 1)
    x_place = RESIDUALS + (item * CHUNK + r)[:, None] * DV + c[None, :]
    held = tl.load(x_place, mask=(r < t)[:, None], other=0.0)
    key = tl.load(KEYS + t * D + 0 * step[:, None] + d[None, :], mask=(step == _KEY)[:, None], other=0.0)
    grown = tl.exp(tl.load(SUMS + t))

    rows = tl.where(is_query, query, key)
    base = dot(rows, factor, tl.zeros([STEP, WIDTH], tl.float32))
    x = minus(v, grown, row_of(base, _KEY)).to(factor.dtype)
    tl.store(RESIDUALS + (item * CHUNK + t) * DV + c, x)
    held = tl.where((r == t)[:, None], x[None, :], held)
    o = row_of(dot(mixing, held, scaled(base, grown)), _QUERY) * scale
    tl.store(OUT + item * DV + c, o.to(OUT.dtype.element_ty))
    if (part == 0) & (head == 0):
        tl.store(LENGTHS + s, length + 1)
    if t == CHUNK - 1:
        close(STATE, KEYS, SUMS, INVERSE + item * (CHUNK * CHUNK), held, grown, c, D, DV, PART)
