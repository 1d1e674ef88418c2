"""Launch the kernels of a pass, on tensors in a layout that they read."""

from __future__ import annotations

import functools

import torch

from rl_kernels.attention.backends.cuda_sm90.plan import THREADS, WARPS, Plan, plan_for, strides_of
from rl_kernels.attention.checks import MULTIPLE
from rl_kernels.attention.gpu import Saved
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.cuda.tensor_map import TensorMap, tensor_map

__all__ = ["WRITES_ALL", "launch_backward", "launch_forward", "plan_for"]

WRITES_ALL = True
"""The kernels also write rows and keys that are in no sequence."""
SWIZZLE, SPAN = 128, 64
"""Bytes, and 16-bit numbers, of a row of a box in shared memory."""
DIMS = 4
"""Dims of a descriptor: packed tensors get a first one of size 1."""


def launch_forward(plan: Plan, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write out, and lse unless it is None; for rows that are in no sequence 0 and -inf."""
    sinks, *integer_tensors = inputs.optional_tensors
    if sinks is not None and sinks.dtype != inputs.q.dtype:
        # The kernels read FP32 or the dtype of the operands.
        sinks = sinks.float()
    launches = plan.forward()
    states = out.new_empty(launches.states, dtype=torch.float32) if launches.states else None
    counter = out.new_zeros(1, dtype=torch.int32) if launches.claims else None
    numbers = (*launches.strides, counter, *launches.numbers)
    args = (*integer_tensors, *launches.shape, inputs.q, out, lse, sinks, states, *numbers)
    maps = _maps_of(inputs, plan.box)
    launches.attend.launch(launches.grid, launches.threads, *maps, *args, shared=launches.shared)
    if launches.finish is not None:
        launches.finish.launch(launches.finish_grid, 32 * WARPS, *args, pdl=True)


def launch_backward(plan: Plan, inputs: Inputs, saved: Saved, into: tuple[torch.Tensor | None, ...]) -> None:
    """Fill ``lses`` and ``deltas``; write the gradients of q and, unless their outputs are None, of k and v."""
    out, lse, lses, deltas, grad = saved
    _, *integer_tensors = inputs.optional_tensors
    launches, strides = plan.backward(), strides_of(grad.stride())
    counters = lse.new_empty(2, dtype=torch.int32)
    row_arguments = (out, grad, lse, lses, deltas, counters, *strides, *launches.sizes)
    launches.rows.launch(launches.rows_grid, THREADS, *row_arguments)
    args = (inputs.q, grad, lses, deltas, *into, *launches.strides, *strides)
    query_arguments, key_arguments = (
        (*integer_tensors, *shape, *args, counter, *numbers)
        for shape, counter, numbers in zip(launches.shapes, counters.unbind(), launches.numbers, strict=True)
    )
    maps = _maps_of(inputs, plan.backward_box)
    launches.queries.launch(launches.queries_grid, launches.threads, *maps, *query_arguments, shared=launches.shared)
    if into[1] is not None and launches.keys_grid:
        box = (1, plan.queries_of_block, plan.group, SPAN)
        rows = _map_of(inputs.q, box, inputs.q), _map_of(grad, box, grad)
        launches.keys.launch(launches.keys_grid, launches.threads, *maps, *rows, *key_arguments, shared=launches.shared)


def _maps_of(inputs: Inputs, keys: int) -> tuple[TensorMap, TensorMap]:
    """Return the descriptors of keys and values: one copy loads ``keys`` rows, 64 columns of one head."""
    box = (1, keys, 1, SPAN)
    return _map_of(inputs.k, box, inputs.q), _map_of(inputs.v, box, inputs.q)


def _map_of(x: torch.Tensor, box: tuple[int, ...], stand_in: torch.Tensor) -> TensorMap:
    """Return a descriptor; an empty tensor, from which nothing is copied, gets the descriptor of ``stand_in``."""
    if not x.numel():
        x = stand_in
    batched = x if x.dim() == DIMS else x[None]
    strides = _legal_strides(batched.shape, batched.stride())
    if strides is not None and 0 in strides:
        # The copy may be freed before the kernel runs: memory is reused in the order of the stream.
        batched, strides = batched.contiguous(), None
    return tensor_map(batched, box, swizzle=SWIZZLE, strides=strides)


@functools.lru_cache(maxsize=4096)
def _legal_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return None if a descriptor accepts the strides, else strides in which dims of size 1 have an accepted one.

    The stride of a dim of size 1 may be any number. A descriptor accepts no stride of 0 (of an expanded tensor).
    """
    outer = zip(shape[:-1], strides[:-1], strict=True)
    legal = (*(MULTIPLE if size == 1 else stride for size, stride in outer), strides[-1])
    return None if legal == strides and 0 not in legal else legal
