"""Bounds on the rounding errors of gated_delta_rule: sums of the magnitudes of terms, by the recurrence and its adjoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.core.testing import Case, Inputs
from rl_kernels.gated_delta.constants import CHUNK, EPS
from rl_kernels.gated_delta.spec.places import TOKENS, places_of, sequences_of

NAMES = (*TOKENS, "initial_state")


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the terms of the output, the state and the gradients."""
    places, sequences = places_of(call), sequences_of(call)
    shape = len(sequences), call["v"].shape[2], call["q"].shape[3], call["v"].shape[3]
    sums = {"out": torch.zeros_like(call["v"]), "state": call["v"].new_zeros(shape)}
    sums |= {f"gradient:{name}": torch.zeros_like(call[name]) for name in NAMES if name in call}
    grad = upstream.get("out", sums["out"])
    grad_state = upstream.get("state", sums["state"])
    scale = abs(call.get("scale") or call["q"].shape[3] ** -0.5)
    for number, ((row, tokens), sequence) in enumerate(zip(places, sequences, strict=True)):
        normalize = call.get("normalize_qk", True)
        results = _sequence(sequence.rows, sequence.state, scale, normalize, grad[row, tokens], grad_state[number])
        out, sums["state"][number], *gradients, dstate = results
        sums["out"][row, tokens] = out
        for name, value in zip(TOKENS, gradients, strict=True):
            sums[f"gradient:{name}"][row, tokens] = value
        if "initial_state" in call:
            sums["gradient:initial_state"][number] = dstate
    return sums


def _sequence(
    rows: tuple[torch.Tensor, ...],
    initial: torch.Tensor | None,
    scale: float,
    normalize: bool,
    grad: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the sums for the output, the state, and the gradients of q, k, v, g, beta and the state."""
    q, k, v, g, beta = (x.double() for x in rows)
    group = v.shape[1] // q.shape[1]
    inverses = [(x.square().sum(-1, keepdim=True) + EPS).rsqrt() if normalize else torch.ones_like(x[..., :1]) for x in (q, k)]
    units = [x * inverse for x, inverse in zip((q, k), inverses, strict=True)]
    q, k = (x.repeat_interleave(group, 1) for x in units)
    state = v.new_zeros((v.shape[1], q.shape[2], v.shape[2])) if initial is None else initial.double()
    size, states, sizes, sides = state.abs(), [], [], []
    for t in range(len(q)):
        decay = g[t].exp()[:, None, None]
        state, size = decay * state, decay * size
        u = beta[t, :, None] * (v[t] - (k[t, :, None] @ state)[:, 0])
        sides.append(v[t].abs() + (k[t, :, None].abs() @ state.abs())[:, 0])
        states.append(state)
        size = size + k[t, :, :, None].abs() * (beta[t, :, None] * sides[-1])[:, None]
        state = state + k[t, :, :, None] * u[:, None]
        sizes.append(size)
    out = [scale * (k_abs[:, None] @ size)[:, 0] for k_abs, size in zip(q.abs(), sizes, strict=True)]
    pull, results = grad_state.double().abs(), []
    for t in reversed(range(len(q))):
        pull = pull + scale * q[t, :, :, None].abs() * grad[t].abs()[:, None]
        du = (k[t, :, None].abs() @ pull)[:, 0]
        dq = scale * (sizes[t] @ grad[t].abs()[:, :, None])[..., 0]
        dk = (pull @ (beta[t, :, None] * sides[t])[..., None] + sizes[t] @ (beta[t, :, None] * du)[..., None])[..., 0]
        pull = pull + k[t, :, :, None].abs() * (beta[t, :, None] * du)[:, None]
        dg = (pull * sizes[t]).sum((1, 2)) + (du * sides[t]).sum(1) + (dq * q[t].abs()).sum(1)
        results.append((dq, dk, beta[t, :, None] * du, dg, (du * sides[t]).sum(1)))
        pull = g[t].exp()[:, None, None] * pull
    if not results:
        return (v, size, *(torch.zeros_like(x) for x in rows), pull)
    # A decay between rows is that of a difference of two sums of g.
    sums = torch.cat([part.cumsum(0) for part in g.split(CHUNK)]).abs().amax(0)[..., None]
    dq, dk, dv, dg, dbeta = (torch.stack(parts[::-1]) for parts in zip(*results, strict=True))
    out, dq, dk, dv = ((1 + sums) * x for x in (torch.stack(out), dq, dk, dv))
    dg, dbeta, size, pull = (1 + sums[..., 0]) * dg, (1 + sums[..., 0]) * dbeta, (1 + sums[..., None]) * size, (1 + sums[..., None]) * pull
    # The gradient of g adds up terms of later rows of its chunk, which nearly cancel.
    dg = torch.cat([part.flip(0).cumsum(0).flip(0) for part in dg.split(CHUNK)])
    dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    if normalize:
        dq, dk = (
            inverse * (x + unit.abs() * (unit.abs() * x).sum(-1, keepdim=True))
            for x, unit, inverse in zip((dq, dk), units, inverses, strict=True)
        )
    return out, size, dq, dk, dv, dg, dbeta, pull
