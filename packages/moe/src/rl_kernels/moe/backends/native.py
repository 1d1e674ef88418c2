"""experts and route in PyTorch: for each expert the products of its routes, by ``rl_kernels.core.products``.

The reduction order is the contract of this backend. A route's products are those of ``det_linear`` of its row with its
expert's weight; a bias is added in FP32 before they are rounded. A token's output, and its gradient, are FP32 sums over
its slots in ascending order, then ``shared``, rounded once. The gradient of a weight is a chain of FP32 additions, one
for each 16 routes of the expert in token order; that of a bias likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core import products
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.moe.activations import activate, activate_backward
from rl_kernels.moe.choice import chosen_experts, logits_gradient, scores_of, weights_of
from rl_kernels.moe.inputs import COUNT, Inputs
from rl_kernels.moe.op import gradients, route_gradients
from rl_kernels.moe.reference import split
from rl_kernels.moe.routes import sort_routes


def forward(*arguments: Any) -> torch.Tensor:
    """Return the output ``[T, D]``."""
    return forward_kept(*arguments)[0]


def forward_kept(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, ``z[T k, 2F]`` and the order."""
    inputs = Inputs(*arguments)
    hidden, ids, count = inputs.hidden, inputs.ids, inputs.gate_up.shape[0]
    order = sort_routes(ids, count)
    z = first_product(inputs, order)
    y = hidden.new_zeros((ids.numel(), hidden.shape[1]))
    for expert, first, end in spans(order, inputs):
        h = activate(*split(z[first:end], inputs.interleaved), inputs.activation)
        bias = None if inputs.down_bias is None else inputs.down_bias[expert]
        y[order[first:end]] = products.matmul(h, inputs.down[expert].t(), bias, hidden.dtype)
    return _combined(y, ids, inputs.weights, inputs.shared, count), z, order


def spans(order: torch.Tensor, inputs: Inputs) -> list[tuple[int, int, int]]:
    """Return (expert, position of its first route, end) of each expert that has routes."""
    bounds = order[inputs.ids.numel() :].tolist()
    every = [(expert, bounds[expert], bounds[expert + 1]) for expert in range(inputs.gate_up.shape[0])]
    return [span for span in every if span[1] < span[2]]


def first_product(inputs: Inputs, order: torch.Tensor) -> torch.Tensor:
    """Return ``z[T k, 2F]``; 0 for routes without an expert."""
    hidden, gate_up, slots = inputs.hidden, inputs.gate_up, inputs.ids.shape[1]
    z = hidden.new_zeros((inputs.ids.numel(), gate_up.shape[1]))
    for expert, first, end in spans(order, inputs):
        bias = None if inputs.gate_up_bias is None else inputs.gate_up_bias[expert]
        z[first:end] = products.matmul(hidden[order[first:end] // slots], gate_up[expert].t(), bias, hidden.dtype)
    return z


def combine(
    y: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    experts: int,
) -> torch.Tensor:
    """Return the sum of ``weights[t, s] y[places[t, s]]`` over s, plus ``shared[t]``; NaN for ids outside [0, E]."""
    rows = y.new_zeros((ids.numel(), y.shape[1]))
    is_here = ((ids >= 0) & (ids < experts)).flatten()
    rows[is_here] = y[places.flatten()[is_here].long()]
    return _combined(rows, ids, weights, shared, experts)


def _combined(
    y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None, experts: int
) -> torch.Tensor:
    """Return the sum of ``weights[t, s] y[t k + s]`` over s, plus ``shared[t]``; NaN for ids outside [0, E]."""
    tokens, slots = ids.shape
    y = y.view(tokens, slots, y.shape[1])
    total = y.new_zeros((tokens, y.shape[2]), dtype=torch.float32)
    for slot in range(slots):
        term = y[:, slot].float()
        term = term if weights is None else weights[:, slot, None].float() * term
        total = torch.where((ids[:, slot] == experts)[:, None], total, total + term)
    total = total if shared is None else total + shared.float()
    is_bad = ((ids < 0) | (ids > experts)).any(1)
    return total.masked_fill(is_bad[:, None], torch.nan).to(y.dtype)


def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of hidden, weights, gate_up, down, gate_up_bias and down_bias."""
    *rest, needs = arguments
    run: Callable[..., tuple[torch.Tensor, ...]] = backward_into
    return run(*rest, None, None, needs)


def backward_into(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return the same, and add the gradients of gate_up and down to FP32 buffers where they are given."""
    inputs = Inputs(*arguments[:COUNT])
    grad, z, order, gate_up_grad, down_grad, needs = arguments[COUNT:]
    hidden, gate_up, down, ids, weights, _, bias, _, activation, interleaved = inputs
    if order is None or z is None:
        order = sort_routes(ids, gate_up.shape[0])
        z = first_product(inputs, order)
    assert weights is not None
    results = gradients(needs, inputs)
    dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = results
    dx = hidden.new_zeros((ids.numel(), hidden.shape[1]))
    route_weights, dots = weights.float().flatten(), dx.new_zeros(ids.numel(), dtype=torch.float32)
    for each in (dgate_up, ddown, dgate_up_bias, ddown_bias):
        each.zero_()
    for expert, first, end in spans(order, inputs):
        routes = order[first:end]
        tokens = routes // ids.shape[1]
        rows, scale = grad[tokens], route_weights[routes][:, None]
        gate, up = split(z[first:end], interleaved)
        h = activate(gate, up, activation).float()
        # In FP32, and without the route's weight, whose gradient then needs no product of its own.
        dh = products.matmul(rows, down[expert], None, torch.float32)
        dot = row_sum(dh * h)
        dots[routes] = dot if bias is None else dot + row_sum(rows.float() * bias[expert].float())
        dz = torch.empty_like(z[first:end])
        for part, value in zip(
            split(dz, interleaved), activate_backward(scale * dh, gate, up, activation), strict=True
        ):
            part.copy_(value)
        if needs[0]:
            dx[routes] = products.matmul(dz, gate_up[expert], None, hidden.dtype)
        if needs[2] or gate_up_grad is not None:
            _add(dz, hidden[tokens], dgate_up, gate_up_grad, expert)
        if needs[3] or down_grad is not None:
            _add(rows, (scale * h).to(hidden.dtype), ddown, down_grad, expert)
        if needs[4]:
            dgate_up_bias[expert] = _sum(dz)
        if needs[5]:
            ddown_bias[expert] = _sum(scale * rows.float())
    if needs[0]:
        dhidden.copy_(_combined(dx, ids, None, None, gate_up.shape[0]))
    if needs[1]:
        dweights.copy_(dots.view(ids.shape))
    return tuple(results)


def _add(
    rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor, buffer: torch.Tensor | None, expert: int
) -> None:
    """Write ``rows^T @ columns`` to ``out[expert]``, or add it to ``buffer[expert]``."""
    if buffer is not None:
        products.chain_dw(rows, columns, buffer[expert])
        return
    total = out.new_zeros(out.shape[1:], dtype=torch.float32)
    out[expert] = products.chain_dw(rows, columns, total)


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of ``rows[M, N]``, a chain of 16 rows per step."""
    total = rows.new_zeros((1, rows.shape[1]), dtype=torch.float32)
    return products.chain_dw(rows.new_ones((len(rows), 1)), rows, total)[0]


def route_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``hidden @ weight^T + bias`` ``[T, E]``."""
    return products.matmul(hidden, weight.t(), bias, out_dtype)


def route_choose(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    top_k: int,
    groups: int,
    kept: int,
    scoring: str,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids ``[T, k]``, int32, and FP32 weights ``[T, k]``."""
    scores = scores_of(logits, scoring)
    if ids is None:
        ids = chosen_experts(scores, correction_bias, top_k, groups, kept)
    return ids.int().clone(), weights_of(scores, ids, scoring, normalize, scale)


def route_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of hidden, weight and bias."""
    *rest, needs = arguments
    run: Callable[..., tuple[torch.Tensor, ...]] = route_backward_into
    return run(*rest, None, needs)


def route_backward_into(
    grad_weights: torch.Tensor,
    grad_logits: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    scoring: str,
    normalize: bool,
    scale: float,
    weight_grad: torch.Tensor | None,
    needs: list[bool],
) -> tuple[torch.Tensor, ...]:
    """Return the same, and add the gradient of the weight to an FP32 buffer."""
    dz = logits_gradient(grad_weights, logits, ids, scoring, normalize, scale)
    dz = (dz if grad_logits is None else dz + grad_logits.float()).to(hidden.dtype)
    results = route_gradients(hidden, weight, needs)
    dhidden, dweight, dbias = results
    if needs[0]:
        dhidden.copy_(products.matmul(dz, weight, None, hidden.dtype))
    if weight_grad is not None:
        products.chain_dw(dz, hidden, weight_grad)
    elif needs[1]:
        dweight.copy_(products.chain_dw(dz, hidden, dweight.new_zeros(dweight.shape, dtype=torch.float32)))
    if needs[2]:
        dbias.copy_(_sum(dz))
    return tuple(results)
