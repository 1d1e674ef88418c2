"""Gradients of the chunks of a call in PyTorch: in reverse through the states, then of all chunks at once.

A key's gradient adds up in this order: through the states, the weights, products of keys, products with queries; value
heads that share a key ascend.
"""

from __future__ import annotations

import torch

from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.gated_delta.chunks import Chunks, Rows, multiply, normalized, rounded, solved
from rl_kernels.gated_delta.constants import CHUNK


def through_states(chunks: Chunks, upstream: torch.Tensor, dstate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the residuals and of the state after each chunk.

    Take the gradients of the last states, and overwrite them with those of the first.
    """
    dresiduals = torch.empty_like(chunks.v)
    dstates = dstate.new_empty((len(dresiduals), *dstate.shape[1:]))
    for part in reversed(chunks.places.parts):
        sequences, grown = chunks.places.sequences[part], chunks.decays[part].exp()[..., None]
        dnext, grad = dstate[sequences], upstream[part]
        dx = multiply(chunks.mixing[part].mT, grad, multiply(chunks.weights[part], dnext))
        dprevious = multiply(chunks.q[part].mT, grown * grad, grown[..., -1:, :] * dnext)
        dstate[sequences] = multiply(chunks.k[part].mT, -grown * dx, dprevious)
        dresiduals[part], dstates[part] = dx, dnext
    return dresiduals, dstates


def of_chunks(
    chunks: Chunks, rows: Rows, upstream: torch.Tensor, dx: torch.Tensor, dnext: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, g and beta, from those of the output, the residuals and the next states."""
    q, k, decays, inverse = chunks.q, chunks.k, chunks.decays, chunks.inverse
    grown, fading = decays.exp()[..., None], (decays[..., -1:] - decays).exp()[..., None]
    dqueries_state, dkeys_state = grown * upstream, -grown * dx
    dq, dk = multiply(dqueries_state, rows.state.mT), multiply(dkeys_state, rows.state.mT)
    dweights = multiply(rows.residuals, dnext.mT)
    dk = multiply(chunks.faded, dweights, dk)
    dinverse = fading * multiply(k, dweights.mT)
    leaving = row_sum(dinverse * inverse)
    dmixing = multiply(upstream, rows.residuals.mT).tril()
    dscores = multiply(dmixing, rounded(inverse, chunks.dtype).mT).tril()
    dinverse = multiply(chunks.scores.mT, dmixing, dinverse).tril()
    dbelow, dbeta = _through_inverse(chunks, dinverse)
    dkk, dqk = chunks.between * dbelow, chunks.between * dscores
    dk = multiply(dkk.mT, k, multiply(dkk, k, dk))
    dq, dk = multiply(dqk, k, dq), multiply(dqk.mT, q, dk)
    moved = dbelow * chunks.below + dscores * chunks.scores
    ddecays = row_sum(dqueries_state * rows.queries_state) + row_sum(dkeys_state * rows.keys_state)
    ddecays = ddecays + row_sum(moved) - row_sum(moved.mT.contiguous()) - leaving
    ddecays[..., -1] += row_sum(leaving) + row_sum(row_sum(grown[..., -1:, :] * rows.state * dnext))
    return dq, dk, dx, _sums_from_end(ddecays), dbeta


def _through_inverse(chunks: Chunks, dinverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the decayed products of keys, and of beta, from that of the inverse."""
    beta = chunks.beta[..., None]
    unit = torch.eye(CHUNK, dtype=beta.dtype, device=beta.device).expand_as(dinverse)
    pulled = multiply(solved(unit, beta * chunks.below).mT, dinverse)
    dsystem = -multiply(pulled, chunks.inverse.mT).tril(-1)
    return beta * dsystem, pulled.diagonal(dim1=-2, dim2=-1) + row_sum(dsystem * chunks.below)


def _sums_from_end(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of ``x[..., 64]`` from each row to the last one, added from the last row on."""
    result = x.clone()
    for t in reversed(range(CHUNK - 1)):
        result[..., t] += result[..., t + 1]
    return result


def over_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the sums over value heads that share a key, ``[M, Hk, 64, D]``, in ascending order."""
    heads = x.unflatten(1, (-1, group)).unbind(2)
    total = heads[0]
    for head in heads[1:]:
        total = total + head
    return total


def through_norm(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from that of x divided by its norm; 0 where the gradient is 0."""
    unit, inverse = normalized(x)
    result = inverse * (grad - unit * row_sum(unit * grad)[..., None])
    # Padding may hold NaN.
    return torch.where((grad == 0).all(-1, keepdim=True), 0.0, result)
