"""experts in Triton: two products of sorted routes, the activation between them, and the sums over slots.

The kernels are in ``products`` and ``rows``, with the orders of their sums. No launch depends on how many tokens an
expert gets: grids follow from T, k and E, and programs without a tile end at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div, next_power_of_2
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.backends.triton import rows
from rl_kernels.moe.backends.triton.grouped import GateUp, Product, WeightGradient
from rl_kernels.moe.backends.triton.routing import route_backward, route_backward_into, route_choose, route_logits
from rl_kernels.moe.backends.triton.schedule import schedules_for
from rl_kernels.moe.backends.triton.sorting import List, Sort
from rl_kernels.moe.op import gradients

__all__ = [
    "backward",
    "backward_into",
    "forward",
    "forward_kept",
    "route_backward",
    "route_backward_into",
    "route_choose",
    "route_logits",
]

WIDEST, WARPS = 1024, 4
"""Largest number of columns that a program of a row kernel holds at once, and its warps."""
BIAS_COLUMNS = 64
"""Columns of a program that sums the gradient of a bias."""


@prepared
def forward(*arguments: Any) -> Launches:
    """Return the output ``[T, D]``."""
    return _forward(*arguments, keeps=False)


@prepared
def forward_kept(*arguments: Any) -> Launches:
    """Return the output, ``z[T k, 2F]`` and the order."""
    return _forward(*arguments, keeps=True)


def _forward(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    shared: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    *,
    keeps: bool,
) -> Launches:
    (count, double, width), (routes, slots) = gate_up.shape, (ids.numel(), ids.shape[1])
    cuts = schedules_for(routes, count, hidden.dtype, hidden.device)
    sort = Sort(ids, count, cuts.gate_up.rows)
    first = GateUp(gate_up, routes, slots, cuts.gate_up, NAMES.index(activation), interleaved)
    second = Product(down, routes, slots, cuts.down, scattered=True)
    combine = _combine(ids, count, width)

    def launch(*arguments: Any) -> Any:
        hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, shared = _readable(arguments[:8], but=(1, 2))
        out, z = hidden.new_empty(hidden.shape), hidden.new_empty((routes, double)) if keeps else None
        with device_of(hidden):
            order, tiles = sort(ids)
            if routes:
                h, y = hidden.new_empty((routes, double // 2)), hidden.new_empty((routes, width))
                first(hidden, gate_up, gate_up_bias, z, h, order, tiles)
                second(h, down, down_bias, y, order, tiles)
                combine(y, ids, weights, shared, out)
        return (out, z, order) if keeps else out

    return launch


@prepared
def backward(*arguments: Any) -> Launches:
    """Return the gradients of hidden, weights, gate_up, down, gate_up_bias and down_bias."""
    *rest, needs = arguments
    prepare: Callable[..., Launches] = _backward
    return prepare(*rest, None, None, needs)


@prepared
def backward_into(*arguments: Any) -> Launches:
    """Return the same, and add the gradients of gate_up and down to FP32 buffers where they are given."""
    return _backward(*arguments)


def _backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    order: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    gate_up_grad: torch.Tensor | None,
    down_grad: torch.Tensor | None,
    needs: list[bool],
) -> Launches:
    (count, double, width), (routes, slots) = gate_up.shape, (ids.numel(), ids.shape[1])
    cuts = schedules_for(routes, count, hidden.dtype, hidden.device)
    sort, list_tiles = Sort(ids, count, cuts.backward.rows), List(routes, count, cuts.backward.rows)
    # Columns as in the forward pass, where one tile has gate and up.
    columns = cuts.gate_up.columns * (2 if interleaved else 1)
    again = Product(gate_up, routes, slots, replace(cuts.backward, columns=columns), gathered=True)
    of_activation = Product(down.mT, routes, slots, cuts.backward, gathered=True)
    of_hidden = Product(gate_up.mT, routes, slots, cuts.backward, scattered=True)
    activate = _activate_backward(routes, slots, count, double // 2, width, activation, interleaved)
    combine = _combine(ids, count, width)
    of_gate_up = WeightGradient(gate_up, gate_up_grad, slots, cuts.gradient, right_gathered=True)
    of_down = WeightGradient(down, down_grad, slots, cuts.gradient, left_gathered=True)
    of_gate_up_bias, of_down_bias = (_bias_gradient(slots, count, size) for size in (double, width))

    def launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
        grad, hidden, gate_up, down, ids, weights, *biases, z, order = _readable(arguments[:10], but=(2, 3))
        *buffers, needs = arguments[12:]
        gate_up_grad, down_grad = buffers or (None, None)
        results = gradients(needs, hidden, weights, gate_up, down, *biases)
        dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = results
        dots = dweights if needs[1] else hidden.new_empty(ids.shape, dtype=torch.float32)
        dz, scaled = hidden.new_empty((routes, double)), hidden.new_empty((routes, double // 2))
        with device_of(hidden):
            if order is None:
                order, tiles = sort(ids)
                z = torch.empty_like(dz)
                if routes:
                    again(hidden, gate_up, biases[0], z, order, tiles)
                bounds = order[routes:]
            else:
                bounds = order[routes:]
                tiles = list_tiles(bounds)
            if routes:
                dh = torch.empty_like(scaled, dtype=torch.float32)
                of_activation(grad, down.mT, None, dh, order, tiles)
                activate(dh, z, weights, grad, biases[1], dz, scaled, dots, order, bounds)
            if needs[0] and routes:
                dx = hidden.new_empty((routes, width))
                of_hidden(dz, gate_up.mT, None, dx, order, tiles)
                combine(dx, ids, None, None, dhidden)
            if needs[2] or gate_up_grad is not None:
                of_gate_up(dz, hidden, dgate_up if gate_up_grad is None else gate_up_grad, order, bounds)
            if needs[3] or down_grad is not None:
                of_down(grad, scaled, ddown if down_grad is None else down_grad, order, bounds)
            if needs[4]:
                of_gate_up_bias(dz, None, dgate_up_bias, order, bounds)
            if needs[5]:
                of_down_bias(grad, weights, ddown_bias, order, bounds)
        return tuple(results)

    return launch


def _readable(operands: tuple[Any, ...], but: tuple[int, int]) -> list[Any]:
    """Return operands as the kernels read them: contiguous, but for the weights, which are read as they are."""
    return [
        x if x is None or place in but or x.is_contiguous() else readable(x, False) for place, x in enumerate(operands)
    ]


def _width(size: int) -> int:
    return min(next_power_of_2(size), WIDEST)


def _activate_backward(
    routes: int, slots: int, count: int, inner: int, size: int, activation: str, interleaved: bool
) -> Launch:
    options = (NAMES.index(activation), interleaved, _width(inner), next_power_of_2(count))
    return Launch(rows.activate_backward, (routes,), (count, inner, size, slots, *options), num_warps=WARPS)


def _combine(ids: torch.Tensor, count: int, size: int) -> Launch:
    tokens, slots = ids.shape
    width = _width(size)
    return Launch(rows.combine, (tokens, ceil_div(size, width)), (count, size, slots, width), num_warps=WARPS)


def _bias_gradient(slots: int, count: int, size: int) -> Launch:
    grid = count, ceil_div(size, BIAS_COLUMNS)
    return Launch(rows.bias_gradient, grid, (size, slots, BIAS_COLUMNS), num_warps=WARPS)
