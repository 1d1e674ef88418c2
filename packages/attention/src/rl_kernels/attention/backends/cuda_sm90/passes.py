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
"""The kernels write rows and keys, too, that are in no sequence."""
SWIZZLE, SPAN = 128, 64
"""Bytes and numbers of a row in shared memory."""
DIMS = 4


def launch_forward(plan: Plan, given: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write out, and lse unless it is None; for rows that are in no sequence 0 and -inf."""
    sinks, *where = given.others
    if sinks is not None and sinks.dtype != given.q.dtype:
        # The kernels read FP32 or the dtype of the operands.
        sinks = sinks.float()
    launches = plan.forward()
    states = out.new_empty(launches.states, dtype=torch.float32) if launches.states else None
    counter = out.new_zeros(1, dtype=torch.int32) if launches.draws else None
    numbers = (*launches.strides, counter, *launches.numbers)
    args = (*where, *launches.shape, given.q, out, lse, sinks, states, *numbers)
    maps = _maps_of(given, plan.box)
    launches.attend.launch(launches.grid, launches.threads, *maps, *args, shared=launches.shared)
    if launches.finish is not None:
        launches.finish.launch(launches.merging, 32 * WARPS, *args, pdl=True)


def launch_backward(plan: Plan, given: Inputs, saved: Saved, into: tuple[torch.Tensor | None, ...]) -> None:
    """Fill ``lses`` and ``deltas``; write the gradients of q and, unless their outputs are None, of k and v."""
    out, lse, lses, deltas, grad = saved
    _, *where = given.others
    launches, strides = plan.backward(), strides_of(grad.stride())
    counters = lse.new_empty(2, dtype=torch.int32)
    of_rows = (out, grad, lse, lses, deltas, counters, *strides, *launches.sizes)
    launches.rows.launch(launches.rows_grid, THREADS, *of_rows)
    args = (given.q, grad, lses, deltas, *into, *launches.strides, *strides)
    of_queries, of_keys = (
        (*where, *shape, *args, counter, *numbers)
        for shape, counter, numbers in zip(launches.shapes, counters.unbind(), launches.numbers, strict=True)
    )
    maps = _maps_of(given, plan.backward_box)
    launches.queries.launch(launches.queries_grid, launches.threads, *maps, *of_queries, shared=launches.shared)
    if into[1] is not None and launches.keys_grid:
        box = (1, plan.queries_of_block, plan.group, SPAN)
        rows = _map_of(given.q, box, given.q), _map_of(grad, box, grad)
        launches.keys.launch(launches.keys_grid, launches.threads, *maps, *rows, *of_keys, shared=launches.shared)


def _maps_of(given: Inputs, keys: int) -> tuple[TensorMap, TensorMap]:
    """Return the descriptors of keys and values: a copy brings ``keys`` of them, 64 columns of one head."""
    box = (1, keys, 1, SPAN)
    return _map_of(given.k, box, given.q), _map_of(given.v, box, given.q)


def _map_of(x: torch.Tensor, box: tuple[int, ...], other: torch.Tensor) -> TensorMap:
    """Return a descriptor. Nothing is copied from an empty tensor; its descriptor is that of ``other``."""
    if not x.numel():
        x = other
    four = x if x.dim() == DIMS else x[None]
    strides = _legal(four.shape, four.stride())
    if strides is not None and 0 in strides:
        # The copy may be freed before the kernel runs: memory is reused in the order of the stream.
        four, strides = four.contiguous(), None
    return tensor_map(four, box, swizzle=SWIZZLE, strides=strides)


@functools.lru_cache(maxsize=4096)
def _legal(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides that a descriptor takes, or None if these are; the stride of a dim of size 1 may be any number.

    A stride of 0, of an expanded tensor, is none that it takes.
    """
    outer = zip(shape[:-1], strides[:-1], strict=True)
    legal = (*(MULTIPLE if size == 1 else stride for size, stride in outer), strides[-1])
    return None if legal == strides and 0 not in legal else legal
