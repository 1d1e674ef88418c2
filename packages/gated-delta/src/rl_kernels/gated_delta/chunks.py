"""The chunks of a call in PyTorch: what needs no state, for all chunks at once, and the pass over chunks.

``chunks_of`` returns sums of the decays, products of queries and keys, and the inverse of each chunk. Then two products
with the state are left for each chunk: ``rows_of`` returns its residuals, and ``next_state`` adds it to the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core import batched
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.gated_delta.cache import DeltaCache
from rl_kernels.gated_delta.constants import CHUNK, EPS
from rl_kernels.gated_delta.inputs import Inputs, state_dtype
from rl_kernels.gated_delta.places import Places


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a[..., M, K] @ b[..., K, N]``, added to ``out``, which is contiguous, unless it is None."""
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
    """All M chunks of a call, in the dtype of sums; factors of products have values of ``dtype``.

    Attributes:
        places: the tokens of the rows.
        dtype: dtype that factors of products are rounded to: that of q.
        q: ``[M, Hv, 64, Dk]``, normalized; k likewise.
        v: ``[M, Hv, 64, Dv]``.
        beta: ``[M, Hv, 64]``.
        decays: ``[M, Hv, 64]``: sums of g from the first row of the chunk.
        between: ``[M, Hv, 64, 64]``: decays from row s to row t >= s, else 0.
        below: ``[M, Hv, 64, 64]``: decayed products of keys t and s <= t, else 0; not rounded.
        inverse: ``[M, Hv, 64, 64]``: T, the inverse of ``1 + diag(beta) below`` times ``diag(beta)``; not rounded.
        scores: ``[M, Hv, 64, 64]``: P, decayed products of query t and key s <= t, else 0.
        mixing: ``[M, Hv, 64, 64]``: M, the scores times the inverse.
        faded: ``[M, Hv, 64, 64]``: F, the inverse times the decay from row t to the end of the chunk.
        weights: ``[M, Hv, 64, Dk]``: W, the transpose of ``faded`` times the keys.
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
    inverse: torch.Tensor
    scores: torch.Tensor
    mixing: torch.Tensor
    faded: torch.Tensor
    weights: torch.Tensor


def chunks_of(inputs: Inputs, places: Places, cache: DeltaCache | None = None) -> Chunks:
    """Return the chunks of a call; rows that a cache holds come from it."""
    dtype, computed = inputs.q.dtype, state_dtype(inputs.q.dtype)
    q, k = (normalized(x)[0].to(dtype) if inputs.normalize_qk else x for x in (inputs.q, inputs.k))
    q, k = (places.rows_of(x, computed).repeat_interleave(inputs.group, 1) for x in (q, k))
    v, g, beta = (places.rows_of(x, computed) for x in (inputs.v, inputs.g, inputs.beta))
    row = torch.arange(CHUNK, device=q.device)
    is_held, is_past = (row < places.opened[:, None])[:, None], row <= row[:, None]
    held_decays, start = torch.zeros_like(g), torch.diag_embed(beta)
    if cache is not None:
        keys, held_decays, held = (x[places.sequences] for x in (cache.keys, cache.decays, cache.inverse))
        k = torch.where(is_held[..., None], keys.repeat_interleave(inputs.group, 1).to(computed), k)
        start = torch.where(is_held[..., None] & is_past, held, start)
    decays = torch.zeros_like(g)
    for t in range(CHUNK):
        later = decays[..., t - 1] + g[..., t] if t else g[..., t]
        decays[..., t] = torch.where(is_held[..., t], held_decays[..., t], later)
    between = torch.where(is_past, decays[..., None] - decays[..., None, :], -torch.inf).exp()
    # An infinite product must not become NaN where it is not used.
    below, scores = (torch.where(is_past, between * multiply(x, k.mT), 0.0) for x in (k, q))
    scores = rounded(scores, dtype)
    inverse = solved(start, torch.where(is_held[..., None], 0.0, beta[..., None] * below))
    mixing = rounded(multiply(scores, rounded(inverse, dtype)), dtype)
    faded = rounded((decays[..., -1:] - decays).exp()[..., None] * inverse, dtype)
    weights = rounded(multiply(faded.mT, k), dtype)
    return Chunks(places, dtype, q, k, v, beta, decays, between, below, inverse, scores, mixing, faded, weights)


def solved(start: torch.Tensor, system: torch.Tensor) -> torch.Tensor:
    """Return the inverse of 1 plus the system ``[..., 64, 64]`` below its diagonal, times the start.

    The terms of a number are subtracted in ascending order, each rounded product by itself.
    """
    result = start.clone()
    for s in range(CHUNK - 1):
        result[..., s + 1 :, : s + 1] -= system[..., s + 1 :, s, None] * result[..., s, None, : s + 1]
    return result


class Rows(NamedTuple):
    """What the state ``[m, Hv, Dk, Dv]`` at the start of chunks, rounded, gives their rows.

    Attributes:
        state: the rounded states.
        keys_state: ``[m, Hv, 64, Dv]``: k times the state; queries_state: q times the state.
        residuals: ``[m, Hv, 64, Dv]``: x, v less the decayed ``keys_state``, rounded.
    """

    state: torch.Tensor
    keys_state: torch.Tensor
    queries_state: torch.Tensor
    residuals: torch.Tensor


def rows_of(chunks: Chunks, part: slice, state: torch.Tensor, cache: DeltaCache | None = None) -> Rows:
    """Return the rows of the chunks in ``part``, from their states ``[m, Hv, Dk, Dv]``."""
    state = rounded(state, chunks.dtype)
    keys_state, queries_state = multiply(chunks.k[part], state), multiply(chunks.q[part], state)
    residuals = rounded(chunks.v[part] - chunks.decays[part].exp()[..., None] * keys_state, chunks.dtype)
    if cache is not None:
        held = cache.residuals[chunks.places.sequences[part]].to(state.dtype)
        is_held = torch.arange(CHUNK, device=state.device) < chunks.places.opened[part, None]
        residuals = torch.where(is_held[:, None, :, None], held, residuals)
    return Rows(state, keys_state, queries_state, residuals)


def output_of(chunks: Chunks, part: slice, rows: Rows, scale: float) -> torch.Tensor:
    """Return the output ``[m, Hv, 64, Dv]``, not rounded."""
    from_state = chunks.decays[part].exp()[..., None] * rows.queries_state
    return multiply(chunks.mixing[part], rows.residuals, from_state).mul_(scale)


def next_state(chunks: Chunks, part: slice, rows: Rows, state: torch.Tensor) -> torch.Tensor:
    """Return the states ``[m, Hv, Dk, Dv]`` after the chunks; empty rows add nothing."""
    from_state = chunks.decays[part][..., -1:].exp()[..., None] * state
    return multiply(chunks.weights[part].mT, rows.residuals, from_state)
