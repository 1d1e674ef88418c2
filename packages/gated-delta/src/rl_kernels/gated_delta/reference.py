"""The definition of gated_delta_rule in plain PyTorch.

With FP64 operands it is the recurrence, token by token: the gold result. With others it is the chunked form, which
rounds where backends do, so that its error is what these roundings cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from rl_kernels.gated_delta.results import GatedDelta

CHUNK, EPS = 64, 1e-6


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    normalize_qk: bool = True,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    return_state: bool = False,
    **_: object,
) -> torch.Tensor | GatedDelta:
    """Return the output ``[B, T, Hv, Dv]`` in the dtype of q, and with ``return_state`` the last states."""
    form = _recurrence if q.dtype == torch.float64 else _chunked
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if normalize_qk:
        q, k = (_normalized(x) for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    out, states = _wide(v.new_zeros(v.shape)), []
    for number, (row, tokens) in enumerate(spans(q, cu_seqlens, start)):
        a, b, c, decays, strengths = (x[row, tokens].transpose(0, 1) for x in (q, k, v, g, beta))
        state = _wide(v).new_zeros((v.shape[2], q.shape[3], v.shape[3]))
        state = state if initial_state is None else initial_state[number]
        result, state = form(a, b, c, decays, strengths, state)
        out = out.index_put(
            (torch.tensor(row, device=v.device), torch.arange(tokens.start, tokens.stop, device=v.device)),
            scale * result.transpose(0, 1),
        )
        states.append(state)
    out = out.to(v.dtype)
    if not return_state:
        return out
    shape = (0, v.shape[2], q.shape[3], v.shape[3])
    return GatedDelta(out, torch.stack(states) if states else _wide(v).new_zeros(shape))


def spans(q: torch.Tensor, cu_seqlens: torch.Tensor | None, start: torch.Tensor | None) -> Iterator[tuple[int, slice]]:
    """Yield the row of the batch and the tokens of each sequence."""
    if cu_seqlens is not None:
        for begin, end in pairwise(cu_seqlens.tolist()):
            yield 0, slice(begin, end)
        return
    for row in range(q.shape[0]):
        yield row, slice(0 if start is None else int(start[row]), q.shape[1])


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normalized(x: torch.Tensor) -> torch.Tensor:
    wide = _wide(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


def _recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[H, T, Dv]`` of one sequence without the scale, and its last state."""
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None].exp()
        u = beta[:, t, None] * (v[:, t] - (k[:, t, None] @ state)[:, 0])
        state = state + k[:, t, :, None] * u[:, None]
        rows.append((q[:, t, None] @ state)[:, 0])
    return torch.stack(rows, 1) if rows else torch.zeros_like(v), state


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, chunk by chunk: FP32 sums of factors that are rounded to the dtype of q."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(v.dtype).float()

    outs = []
    for first in range(0, q.shape[1], CHUNK):
        a, b, c, decay, strength = (x[:, first : first + CHUNK].float() for x in (q, k, v, g, beta))
        decay, strength = decay.cumsum(1), strength[..., None]
        is_past = torch.ones(decay.shape[1], decay.shape[1], dtype=torch.bool, device=q.device).tril()
        between = torch.where(is_past, decay[..., None] - decay[..., None, :], -torch.inf).exp()
        grown, fading = decay.exp()[..., None], (decay[:, -1:] - decay).exp()[..., None]
        system = torch.eye(decay.shape[1], device=q.device) + strength * (between * (b @ b.mT)).tril(-1)
        start = torch.diag_embed(strength[..., 0])
        inverse = torch.linalg.solve_triangular(system, start, upper=False, unitriangular=True)
        mixing = rounded(rounded(between * (a @ b.mT)) @ rounded(inverse))
        weights = rounded(rounded(fading * inverse).mT @ b)
        factor = rounded(state)
        residuals = rounded(c - grown * (b @ factor))
        outs.append(grown * (a @ factor) + mixing @ residuals)
        state = decay[:, -1:, None].exp() * state + weights.mT @ residuals
    return torch.cat(outs, 1) if outs else torch.zeros_like(v, dtype=torch.float32), state
