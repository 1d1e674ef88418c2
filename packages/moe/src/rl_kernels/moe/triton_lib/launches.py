"""The raw ops of experts on a GPU: two products of sorted routes, the activation, and the sums over slots.

Order, gradient of the activation and sums are kernels in Triton for all backends; a ``Kit`` has a backend's products.
No launch depends on how many tokens an expert gets: grids follow from T, k and E; blocks without a tile end at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div, next_power_of_2
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.inputs import COUNT, Inputs
from rl_kernels.moe.op import gradients
from rl_kernels.moe.triton_lib import rows
from rl_kernels.moe.triton_lib.schedule import Schedules
from rl_kernels.moe.triton_lib.sorting import List, Sort

WIDEST, WARPS = 1024, 4
"""Largest number of columns that a program of a row kernel holds at once, and its warps."""
BIAS_COLUMNS = 64
"""Columns of a program that sums the gradient of a bias."""


class Kit(NamedTuple):
    """The products of a call and their schedules; the classes of ``grouped`` say what they take.

    Unless ``is_sorted``, products of the forward pass take ids in place of the order, and no tiles; rows between them
    are then routes.
    """

    cuts: Schedules
    gate_up: Callable[..., Any]
    product: Callable[..., Any]
    weight_gradient: Callable[..., Any]
    is_sorted: bool = True


KitOf = Callable[[Inputs, bool], Kit]
"""A function of the inputs of a call, and whether its order is used: for outputs that are kept, or in backward."""


def raw_ops(kit_of: KitOf) -> tuple[prepared, ...]:
    """Return the raw ops ``forward``, ``forward_kept``, ``backward`` and ``backward_into`` of a backend."""
    makers = (partial(_forward, kit_of, False), partial(_forward, kit_of, True), partial(_first_backward, kit_of))
    return tuple(prepared(make) for make in (*makers, partial(_backward, kit_of)))


def _forward(kit_of: KitOf, keeps: bool, *arguments: Any) -> Launches:
    """Return the output ``[T, D]``; with ``keeps`` also ``z[T k, 2F]`` and the order."""
    inputs = Inputs(*arguments)
    _, gate_up, down, ids, *_, activation, interleaved = inputs
    (count, _, width), (routes, slots) = gate_up.shape, (ids.numel(), ids.shape[1])
    kit = kit_of(inputs, keeps)
    sort = Sort(ids, count, kit.cuts.gate_up.rows)
    first = kit.gate_up(gate_up, routes, slots, kit.cuts.gate_up, NAMES.index(activation), interleaved, keeps)
    second = kit.product(down, routes, slots, kit.cuts.down, scattered=True)
    combine = _combine(ids, count, width)
    # The routes of a single token need no order: each is a tile, of which there are as many as experts.
    is_sorted = kit.is_sorted and (keeps or len(ids) != 1 or slots > count)
    is_summed = inputs.weights is not None

    def launch(*arguments: Any) -> Any:
        hidden, gate_up, down, ids, weights, gate_up_bias, down_bias, shared, *_ = _readable(arguments)
        with device_of(hidden):
            order, tiles = sort(ids) if is_sorted else (ids, None)
            z, h = first(hidden, gate_up, gate_up_bias, order, tiles)
            out = second(h, down, down_bias, order, tiles)
            if is_summed:
                y, out = out, hidden.new_empty(hidden.shape)
                if routes:
                    combine(y, ids, None, weights, shared, out)
        return (out, z, order) if keeps else out

    return launch


@prepared
def combine_routes(y: torch.Tensor, ids: torch.Tensor, *arguments: Any) -> Launches:
    """Return the sums of rows of ``y[R, D]``, the raw op ``combine``."""
    *_, count = arguments
    combine = _combine(ids, count, y.shape[1])

    def launch(*arguments: Any) -> torch.Tensor:
        y, ids, places, weights, shared = _contiguous(*arguments[:5])
        out: torch.Tensor = y.new_empty((ids.shape[0], y.shape[1]))
        with device_of(y):
            if out.numel():
                combine(y, ids, places, weights, shared, out)
        return out

    return launch


def _first_backward(kit_of: KitOf, *arguments: Any) -> Launches:
    """Return the gradients of hidden, weights, gate_up, down, gate_up_bias and down_bias."""
    *rest, needs = arguments
    prepare: Callable[..., Launches] = _backward
    return prepare(kit_of, *rest, None, None, needs)


def _backward(kit_of: KitOf, *arguments: Any) -> Launches:
    """Return the same, and add the gradients of gate_up and down to FP32 buffers where they are given."""
    inputs = Inputs(*arguments[:COUNT])
    _, gate_up, down, ids, *_, activation, interleaved = inputs
    *_, gate_up_grad, down_grad, _ = arguments
    (count, double, width), (routes, slots) = gate_up.shape, (ids.numel(), ids.shape[1])
    kit = kit_of(inputs, True)
    cuts = kit.cuts
    sort, list_tiles = Sort(ids, count, cuts.backward.rows), List(routes, count, cuts.backward.rows)
    # Columns as in the forward pass, where one tile has gate and up.
    columns = cuts.gate_up.columns * (2 if interleaved else 1)
    again = kit.product(gate_up, routes, slots, replace(cuts.backward, columns=columns), gathered=True)
    of_activation = kit.product(down.mT, routes, slots, cuts.backward, gathered=True, out_dtype=torch.float32)
    of_hidden = kit.product(gate_up.mT, routes, slots, cuts.backward, scattered=True)
    activate = _activate_backward(routes, slots, count, double // 2, width, activation, interleaved)
    combine = _combine(ids, count, width)
    of_gate_up = kit.weight_gradient(gate_up, gate_up_grad, slots, cuts.gradient, right_gathered=True)
    of_down = kit.weight_gradient(down, down_grad, slots, cuts.gradient, left_gathered=True)
    of_gate_up_bias, of_down_bias = (_bias_gradient(slots, count, size) for size in (double, width))

    def launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
        inputs, (grad, z, order) = _readable(arguments), _contiguous(*arguments[COUNT : COUNT + 3])
        *buffers, needs = arguments[COUNT + 3 :]
        gate_up_grad, down_grad = buffers or (None, None)
        hidden, gate_up, down, ids, weights, *biases = inputs[:7]
        results = gradients(needs, inputs)
        dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias = results
        dots = dweights if needs[1] else hidden.new_empty(ids.shape, dtype=torch.float32)
        dz, scaled = hidden.new_empty((routes, double)), hidden.new_empty((routes, double // 2))
        with device_of(hidden):
            if order is None:
                order, tiles = sort(ids)
                z = again(hidden, gate_up, biases[0], order, tiles)
                bounds = order[routes:]
            else:
                bounds = order[routes:]
                tiles = list_tiles(bounds)
            # In this order, and without names for what is read once, the most memory is z, dz, and for each route h, dh
            # and w h or a row of hidden.
            if routes:
                activate(
                    of_activation(grad, down.mT, None, order, tiles),
                    *(z, weights, grad, biases[1], dz, scaled, dots, order, bounds),
                )
            if needs[3] or down_grad is not None:
                of_down(grad, scaled, ddown if down_grad is None else down_grad, order, bounds)
            del scaled
            if needs[0] and routes:
                combine(of_hidden(dz, gate_up.mT, None, order, tiles), ids, None, None, None, dhidden)
            if needs[2] or gate_up_grad is not None:
                of_gate_up(dz, hidden, dgate_up if gate_up_grad is None else gate_up_grad, order, bounds)
            if needs[4]:
                of_gate_up_bias(dz, None, dgate_up_bias, order, bounds)
            if needs[5]:
                of_down_bias(grad, weights, ddown_bias, order, bounds)
        return tuple(results)

    return launch


def _readable(arguments: tuple[Any, ...]) -> Inputs:
    """Return the inputs as the kernels read them: tensors are contiguous, but the weights are read as they are."""
    hidden, gate_up, down, *tensors = arguments[:8]
    hidden, *tensors = _contiguous(hidden, *tensors)
    return Inputs(hidden, gate_up, down, *tensors, *arguments[8:COUNT])


def _contiguous(*tensors: Any) -> list[Any]:
    return [x if x is None or x.is_contiguous() else readable(x, False) for x in tensors]


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
