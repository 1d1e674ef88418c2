"""The chunks of a call in PyTorch: what needs no state, for all chunks at once, and the pass over chunks.

``Chunks`` has sums of the decays, products of queries and keys, and the inverse of each block of 16 rows.
``Scan.step`` then takes chunks of the same number, whose states are known, and returns their rows and next states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core import batched
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.gated_delta.cache import DeltaCache
from rl_kernels.gated_delta.constants import BLOCK, BLOCKS, CHUNK, EPS
from rl_kernels.gated_delta.inputs import Inputs, state_dtype
from rl_kernels.gated_delta.places import Places


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a[..., M, K] @ b[..., K, N]``, added to a contiguous ``out`` if it is given."""
    lead = a.shape[:-2]
    if a.dtype == torch.float64:
        return a @ b if out is None else out.add_(a @ b)
    a, b = a.flatten(0, -3), b.flatten(0, -3)
    product = batched.multiply(a, b, None if out is None else out.flatten(0, -3))
    return product.view(*lead, *product.shape[1:])


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a dtype, and convert back."""
    return x.to(dtype).to(x.dtype)


def normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x[..., D]`` divided by its norm, and one over the norm ``[..., 1]``, in the dtype of sums."""
    x = x.to(state_dtype(x.dtype))
    inverse = 1 / (row_sum(x * x) + EPS).sqrt()[..., None]
    return x * inverse, inverse


class Chunks(NamedTuple):
    """What the pass over chunks reads, for all M chunks, in the dtype of sums; rounded where a product reads it.

    Attributes:
        places: the tokens of the rows.
        dtype: dtype that factors of products are rounded to: that of q.
        q: ``[M, Hv, 64, Dk]``, normalized; k likewise.
        v: ``[M, Hv, 64, Dv]``.
        beta: ``[M, Hv, 64, 1]``.
        decays: ``[M, Hv, 64]``: sums of g from the first row of the chunk.
        between: ``[M, Hv, 64, 64]``: decays from row s to row t >= s, else 0.
        below: ``[M, Hv, 64, 64]``: decayed products of keys t and s < t, else 0; not rounded.
        scores: ``[M, Hv, 64, 64]``: decayed products of query t and key s <= t, else 0; not rounded.
        inverse: ``[M, Hv, 4, 16, 16]``: inverse of the system of each block, not rounded.
    """

    places: Places
    dtype: torch.dtype
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    decays: torch.Tensor
    between: torch.Tensor
    below: torch.Tensor
    scores: torch.Tensor
    inverse: torch.Tensor


def chunks_of(inputs: Inputs, places: Places, cache: DeltaCache | None = None) -> Chunks:
    """Return the chunks of a call; rows that a cache holds come from it."""
    dtype, computed = inputs.q.dtype, state_dtype(inputs.q.dtype)
    q, k = (normalized(x)[0].to(dtype) if inputs.normalize_qk else x for x in (inputs.q, inputs.k))
    q, k = (places.rows_of(x, computed).repeat_interleave(inputs.group, 1) for x in (q, k))
    v, g, beta = (places.rows_of(x, computed) for x in (inputs.v, inputs.g, inputs.beta))
    row = torch.arange(CHUNK, device=q.device)
    is_held = (row < places.opened[:, None])[:, None]
    held = torch.zeros_like(g)
    if cache is not None:
        keys = cache.keys.repeat_interleave(inputs.group, 1)[places.sequences].to(computed)
        k = torch.where(is_held[..., None], keys, k)
        held = cache.decays[places.sequences]
    decays = torch.zeros_like(g)
    for t in range(CHUNK):
        later = decays[..., t - 1] + g[..., t] if t else g[..., t]
        decays[..., t] = torch.where(is_held[..., t], held[..., t], later)
    is_past = row <= row[:, None]
    between = torch.where(is_past, decays[..., None] - decays[..., None, :], -torch.inf).exp()
    below = torch.where(row < row[:, None], between * multiply(k, k.mT), 0.0)
    # An infinite product must not become NaN where it is not used.
    scores = torch.where(is_past, between * multiply(q, k.mT), 0.0)
    inverse = _inverse(beta, below, places, is_held, cache)
    return Chunks(places, dtype, q, k, v, beta[..., None], decays, between, below, scores, inverse)


def _inverse(
    beta: torch.Tensor, below: torch.Tensor, places: Places, is_held: torch.Tensor, cache: DeltaCache | None
) -> torch.Tensor:
    """Return the inverse of ``1 + diag(beta) below`` for each block of 16 rows, row by row."""
    lead = below.shape[:2]
    blocks = torch.stack([below[:, :, n : n + BLOCK, n : n + BLOCK] for n in range(0, CHUNK, BLOCK)], 2)
    is_held = is_held.view(len(beta), 1, BLOCKS, BLOCK, 1)
    system = torch.where(is_held, 0.0, beta.view(*lead, BLOCKS, BLOCK, 1) * blocks)
    inverse = torch.eye(BLOCK, dtype=beta.dtype, device=beta.device).repeat(*lead, BLOCKS, 1, 1)
    if cache is not None:
        inverse = torch.where(is_held, cache.inverse[places.sequences][:, :, None], inverse)
    for s in range(BLOCK - 1):
        inverse[..., s + 1 :, :] -= system[..., s + 1 :, s, None] * inverse[..., s, None, :]
    return inverse


class Rows(NamedTuple):
    """The rows of some chunks ``[m, Hv, 64, Dv]``, as far as backward needs them.

    Attributes:
        state: ``[m, Hv, Dk, Dv]``: the states at the start of the chunks.
        keys_state: k times the state; queries_state: q times the state.
        sides: right sides of the equations of u, not multiplied by beta.
        rounded_sides: the same times beta, rounded.
        u: pseudo values, rounded.
    """

    state: torch.Tensor
    keys_state: torch.Tensor
    queries_state: torch.Tensor
    sides: torch.Tensor
    rounded_sides: torch.Tensor
    u: torch.Tensor


def rows_of(chunks: Chunks, part: slice, state: torch.Tensor, cache: DeltaCache | None) -> Rows:
    """Return the rows of the chunks in ``part``, from their states ``[m, Hv, Dk, Dv]``."""
    dtype, k = chunks.dtype, chunks.k[part]
    factor = rounded(state, dtype)
    keys_state, queries_state = multiply(k, factor), multiply(chunks.q[part], factor)
    sides = chunks.v[part] - chunks.decays[part].exp()[..., None] * keys_state
    below, inverse = -rounded(chunks.below[part], dtype), rounded(chunks.inverse[part], dtype)
    u, rounded_sides = torch.zeros_like(sides), torch.zeros_like(sides)
    opened = chunks.places.opened[part, None, None, None]
    held = None if cache is None else cache.values[chunks.places.sequences[part]].to(state.dtype)
    row = torch.arange(CHUNK, device=k.device)[:, None]
    for block in range(BLOCKS):
        rows = slice(block * BLOCK, block * BLOCK + BLOCK)
        # Rows of this block and later ones are still zeros.
        side = multiply(below[:, :, rows], u, sides[:, :, rows].clone(memory_format=torch.contiguous_format))
        sides[:, :, rows] = side
        scaled = rounded(chunks.beta[part][:, :, rows] * side, dtype)
        if held is not None:
            scaled = torch.where(row[rows] < opened, held[:, :, rows], scaled)
        solved = rounded(multiply(inverse[:, :, block], scaled), dtype)
        if held is not None:
            solved = torch.where(rows.stop <= opened, held[:, :, rows], solved)
        u[:, :, rows], rounded_sides[:, :, rows] = solved, scaled
    return Rows(state, keys_state, queries_state, sides, rounded_sides, u)


def output_of(chunks: Chunks, part: slice, rows: Rows, scale: float) -> torch.Tensor:
    """Return the output ``[m, Hv, 64, Dv]``, not rounded."""
    total = chunks.decays[part].exp()[..., None] * rows.queries_state
    return multiply(rounded(chunks.scores[part], chunks.dtype), rows.u, total).mul_(scale)


def next_state(chunks: Chunks, part: slice, rows: Rows) -> torch.Tensor:
    """Return the states ``[m, Hv, Dk, Dv]`` after the chunks; empty rows add nothing."""
    decays = chunks.decays[part]
    last = decays[..., -1:]
    faded = rounded((last - decays).exp()[..., None] * rows.u, chunks.dtype)
    return multiply(chunks.k[part].mT, faded, last.exp()[..., None] * rows.state)
