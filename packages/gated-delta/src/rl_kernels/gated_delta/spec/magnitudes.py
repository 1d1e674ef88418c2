"""Bounds on the rounding errors of gated_delta_rule, by the recurrence and its adjoint.

Both bounds take the same way: sums of the terms' magnitudes, and the roots of sums of their squares, which are standard
deviations of results whose terms have independent relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.core.testing import Case, Inputs
from rl_kernels.gated_delta.constants import CHUNK, EPS
from rl_kernels.gated_delta.spec.places import TOKENS, Tokens, places_of, sequences_of

NAMES = (*TOKENS, "initial_state")
Results = dict[str, torch.Tensor]
ROUNDED = 4
"""Inside a chunk six: q, k, their product, the inverse, the product of both, the residual; of a state's term two."""


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> Results:
    """Sum the magnitudes of the terms of the output, the state and the gradients.

    The decay between two rows is that of a difference of two sums of g, whose error grows with these sums.
    """
    sums = _sums(call, upstream, 1)
    for number, ((row, tokens), sequence) in enumerate(zip(places_of(call), sequences_of(call), strict=True)):
        g = sequence.rows[3].double()
        if not len(g):
            continue
        factor = 1 + torch.cat([part.cumsum(0) for part in g.split(CHUNK)]).abs().amax(0)
        for name, value in sums.items():
            if name in ("state", "gradient:initial_state"):
                value[number] *= factor[:, None, None]
            elif name in ("gradient:q", "gradient:k"):
                value[row, tokens] *= factor.max()
            else:
                value[row, tokens] *= factor.view(-1, *[1] * (value.ndim - 3))
    return sums


def deviations(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> Results:
    """Return standard deviations of the results: a term is a product of about ``ROUNDED`` rounded factors."""
    return {name: value.mul(ROUNDED).sqrt() for name, value in _sums(call, upstream, 2).items()}


def _sums(call: Inputs, upstream: Mapping[str, torch.Tensor], power: int) -> Results:
    """Sum the powers of the magnitudes of all terms."""
    places, sequences = places_of(call), sequences_of(call)
    shape = len(sequences), call["v"].shape[2], call["q"].shape[3], call["v"].shape[3]
    sums = {"out": torch.zeros_like(call["v"]), "state": call["v"].new_zeros(shape)}
    sums |= {f"gradient:{name}": torch.zeros_like(call[name]) for name in NAMES if name in call}
    sums = {name: value.double() for name, value in sums.items()}
    grad, grad_state = upstream.get("out", sums["out"]), upstream.get("state", sums["state"])
    scale = abs(call.get("scale") or call["q"].shape[3] ** -0.5)
    for number, ((row, tokens), sequence) in enumerate(zip(places, sequences, strict=True)):
        terms = _Terms(sequence, scale, call.get("normalize_qk", True), power)
        sums["out"][row, tokens], sums["state"][number] = terms.out, terms.size
        if upstream:
            *gradients, dstate = terms.gradients(grad[row, tokens].double(), grad_state[number].double())
            for name, value in zip(TOKENS, gradients, strict=True):
                sums[f"gradient:{name}"][row, tokens] = value
            if "initial_state" in call:
                sums["gradient:initial_state"][number] = dstate
    return sums


class _Terms:
    """The terms of one sequence: ``size`` sums the powers of those of the state, ``out`` of those of the output."""

    def __init__(self, sequence: Tokens, scale: float, normalize: bool, power: int) -> None:
        q, k, v, self.g, beta = (x.double() for x in sequence.rows)
        self.group, self.normalize, self.power, self.scale = v.shape[1] // q.shape[1], normalize, power, scale**power
        self.inverses = [(x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k)]
        units = [x * inverse for x, inverse in zip((q, k), self.inverses, strict=True)] if normalize else [q, k]
        self.units = [self._raised(x) for x in units]
        q, k = self.rows = [x.repeat_interleave(self.group, 1) for x in units]
        self.signed_beta, self.signed_scale = beta[..., None], scale
        self.q, self.k, self.beta = self._raised(q), self._raised(k), self._raised(beta)
        state = v.new_zeros((v.shape[1], q.shape[2], v.shape[2]))
        state = state if sequence.state is None else sequence.state.double()
        size, self.sizes, self.sides = self._raised(state), [], []
        for t in range(len(q)):
            decay = self.g[t].exp()[:, None, None]
            state, size = decay * state, decay**power * size
            u = beta[t, :, None] * (v[t] - (k[t, :, None] @ state)[:, 0])
            side = self._raised(v[t]) + (self.k[t, :, None] @ self._raised(state))[:, 0]
            size = size + self.k[t, :, :, None] * (self.beta[t, :, None] * side)[:, None]
            state = state + k[t, :, :, None] * u[:, None]
            self.sizes.append(size)
            self.sides.append(side)
        self.size = size
        rows = [self.scale * (x[:, None] @ size)[:, 0] for x, size in zip(self.q, self.sizes, strict=True)]
        self.out = torch.stack(rows) if rows else v

    def _raised(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs() ** self.power

    def gradients(self, grad: torch.Tensor, grad_state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sum the powers of the terms of the gradients of q, k, v, g, beta and the state.

        ``adjoint`` is the gradient of the state, ``pull`` sums the powers of its terms: those of a change are the
        products with the adjoint itself, as those of the state's are, since sums of sums would grow with each token.
        """
        adjoint, grads, rows = grad_state, grad, []
        grad, pull = self._raised(grad), self._raised(grad_state)
        for t in reversed(range(len(self.q))):
            beta, side, size = self.beta[t, :, None], self.sides[t], self.sizes[t]
            q, k = (x[t, :, :, None] for x in self.rows)
            adjoint = adjoint + self.signed_scale * q * grads[t][:, None]
            pull = pull + self.scale * self.q[t, :, :, None] * grad[t][:, None]
            du, change = ((self.k[t, :, None] @ x)[:, 0] for x in (pull, self._raised(adjoint)))
            dq = self.scale * (size @ grad[t][:, :, None])[..., 0]
            dk = (pull @ (beta * side)[..., None] + size @ (beta * du)[..., None])[..., 0]
            pull = pull + self.k[t, :, :, None] * (beta * change)[:, None]
            dg = (pull * size).sum((1, 2)) + (du * side).sum(1) + (dq * self.q[t]).sum(1)
            rows.append((dq, dk, beta * du, dg, (du * side).sum(1)))
            decay = self.g[t].exp()[:, None, None]
            adjoint = decay * (adjoint - k * (self.signed_beta[t] * (k.mT @ adjoint)[:, 0])[:, None])
            pull = decay**self.power * pull
        if not rows:
            return (*[pull.new_zeros(())] * 5, pull)
        dq, dk, dv, dg, dbeta = (torch.stack(parts[::-1]) for parts in zip(*rows, strict=True))
        # The gradient of g adds up terms of later rows of its chunk, which nearly cancel.
        dg = torch.cat([part.flip(0).cumsum(0).flip(0) for part in dg.split(CHUNK)])
        dq, dk = (x.unflatten(1, (-1, self.group)).sum(2) for x in (dq, dk))
        if self.normalize:
            dq, dk = (
                self._raised(inverse) * (x + unit * (unit * x).sum(-1, keepdim=True))
                for x, unit, inverse in zip((dq, dk), self.units, self.inverses, strict=True)
            )
        return dq, dk, dv, dg, dbeta, pull
