"""Launch the kernels of a pass, on tensors in a layout that they read."""

from __future__ import annotations

import functools

import torch

from rl_kernels.attention.backends.cuda_sm90.plan import THREADS, WARPS, Plan, plan_for, strides_of
from rl_kernels.attention.backends.cuda_sm90.schedule import TILE
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
    """Write out, and lse unless it is None, for the rows that are in a sequence."""
    sinks, *where = given.others
    launches, width = plan.forward(), plan.tile.widths[1]
    states: tuple[torch.Tensor | None, ...] = (None, None, None)
    if launches.states:
        states = tuple([out.new_empty(launches.states * size, dtype=torch.float32) for size in (1, 1, width)])
    counter = out.new_zeros(1, dtype=torch.int32) if launches.draws else None
    numbers = (*launches.strides, counter, *launches.numbers)
    args = (*where, *launches.shape, given.q, out, lse, sinks, *states, *numbers)
    maps = _maps_of(given, plan.box)
    launches.attend.launch(launches.grid, plan.tile.threads, *maps, *args, shared=plan.tile.shared)
    if launches.finish is not None:
        launches.finish.launch(launches.merging, 32 * WARPS, *args, pdl=True)


def launch_backward(plan: Plan, given: Inputs, saved: Saved, into: tuple[torch.Tensor | None, ...]) -> None:
    """Fill ``lses`` and ``deltas``; write the gradients of q and, unless their outputs are None, of k and v."""
    out, lse, lses, deltas, grad = saved
    _, *where = given.others
    launches, tile, strides = plan.backward(), plan.backward_tile, strides_of(grad.stride())
    counters = lse.new_empty(2, dtype=torch.int32)
    rows = (out, grad, lse, lses, deltas, counters, *strides, *launches.sizes)
    launches.rows.launch(launches.rows_grid, THREADS, *rows)
    args = (given.q, grad, lses, deltas, *into, *launches.strides, *strides)
    of_queries, of_keys = (
        (*where, *shape, *args, counter, *numbers)
        for shape, counter, numbers in zip(launches.shapes, counters.unbind(), launches.numbers, strict=True)
    )
    maps = _maps_of(given, plan.backward_box)
    launches.queries.launch(launches.queries_grid, tile.threads, *maps, *of_queries, shared=tile.shared)
    dk, dv = into[1:]
    if dk is None or dv is None:
        return
    if launches.keys_grid:
        box = (1, plan.queries_of_block, plan.group, SPAN)
        maps = (*_maps_of(given, TILE), _map_of(given.q, box, given.q), _map_of(grad, box, grad))
        launches.keys.launch(launches.keys_grid, tile.threads, *maps, *of_keys, shared=tile.shared)
    else:
        dk.zero_(), dv.zero_()


def _maps_of(given: Inputs, keys: int) -> tuple[TensorMap, TensorMap]:
    """Return the descriptors of keys and values: a copy brings ``keys`` of them, 64 columns of one head."""
    box = (1, keys, 1, SPAN)
    return _map_of(given.k, box, given.q), _map_of(given.v, box, given.q)


def _map_of(x: torch.Tensor, box: tuple[int, ...], other: torch.Tensor) -> TensorMap:
    """Return a descriptor. Nothing is copied from an empty tensor; its descriptor is that of ``other``."""
    # The copy may be freed before the kernel runs: memory is reused in the order of the stream.
    whole = _whole(x if x.numel() else other)
    return tensor_map(whole, box, swizzle=SWIZZLE, strides=_legal(whole.shape, whole.stride()))


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of four dims without a stride of 0, which a descriptor cannot have; an expanded one is copied."""
    four = x if x.ndim == DIMS else x[None]
    return four.contiguous() if 0 in four.stride() else four


@functools.lru_cache(maxsize=4096)
def _legal(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides that a descriptor takes, or None if these are; the stride of a dim of size 1 may be any number."""
    outer = zip(shape[:-1], strides[:-1], strict=True)
    legal = (*(MULTIPLE if size == 1 else stride for size, stride in outer), strides[-1])
    return None if legal == strides else legal
