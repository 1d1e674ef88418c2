"""det_attention in Triton: the launches of the forward and the backward pass.

The reduction order is the contract of this backend. Keys are counted from the first key of their sequence and taken in
blocks of 64. Each segment of 1024 keys has its own state, and states are merged in ascending order. A warp group
multiplies 64 keys at once with registers to spare at every head size. Segments of 1024 keys keep the merges below a few
percent of a prompt's time, and cut a cache of 32768 keys into enough programs to fill a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_kernels.attention import gpu
from rl_kernels.attention.backends.triton.boxes import descriptors_of
from rl_kernels.attention.backends.triton.plan import Plan
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of


def _forward(*arguments: Any, with_lse: bool) -> Launches:
    """Return (out, lse), or out alone, for the arguments of ``Inputs``."""
    copied = gpu.unreadable(arguments, expanded=True)
    inputs = Inputs._make(gpu.as_read(arguments, copied))
    plan, out_shape, lse_shape = Plan(inputs), inputs.out_shape(), inputs.lse_shape()
    if plan.is_empty:
        return gpu.forward_without_queries(out_shape, lse_shape, with_lse=with_lse)
    attend, finish, count = plan.forward()
    boxes, state_sizes = plan.boxes, (count, count, count * plan.width_v)
    # The kernels write rows of sequences only.
    may_skip_rows = inputs.cu_seqlens_q is not None

    def launch(*args: Any) -> Any:
        q, k, v, sinks, *integer_tensors, table = (gpu.with_copies(args, copied) if copied else args)[:10]
        out = q.new_empty(*out_shape)
        lse = q.new_empty(*lse_shape, dtype=torch.float32) if with_lse else None
        if may_skip_rows:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        states: Any = (None, None, None)
        if count:
            states = [q.new_empty(size, dtype=torch.float32) for size in state_sizes]
        described = descriptors_of(boxes, k, v) if boxes else (None, None)
        with device_of(q):
            attend(q, k, v, out, lse, sinks, *integer_tensors, table, *described, *states)
            if count:
                finish(out, lse, sinks, *integer_tensors, *states)
        return out if lse is None else (out, lse)

    return launch


forward, output = prepared(partial(_forward, with_lse=True)), prepared(partial(_forward, with_lse=False))


@prepared
def backward(*arguments: Any) -> Launches:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, out's gradient, and what is needed."""
    copied = gpu.unreadable(arguments, expanded=True)
    *fields, _, lse, grad, needs_queries, needs_keys = gpu.as_read(arguments, copied)
    inputs = Inputs._make(fields)
    if needs_keys and inputs.block_table is not None:
        raise ValueError("block_table: expected None, keys on pages have no gradients")
    plan = Plan(inputs)
    if plan.is_empty:
        return gpu.backward_without_queries
    rows, queries, keys, row_boxes = plan.backward(grad.stride())
    key_boxes, row_shape = plan.boxes, gpu.row_shape(lse, plan.kv_heads)
    # The kernels write rows and keys of sequences only. Padding, and keys without a query, get zeros.
    may_skip_rows = inputs.cu_seqlens_q is not None
    may_skip_keys = inputs.k_start is not None or inputs.cu_seqlens_k is not None

    def launch(*args: Any) -> tuple[torch.Tensor, ...]:
        args = gpu.with_copies(args, copied) if copied else args
        q, k, v, sinks, *integer_tensors, table = args[:10]
        out, lse, grad, *_ = args[gpu.OUT :]
        of_queries = q.shape if needs_queries else (0,)
        dq = q.new_zeros(of_queries) if may_skip_rows else q.new_empty(of_queries)
        shapes = (k.shape, v.shape) if needs_keys else (0, 0)
        dk, dv = [q.new_zeros(shape) if may_skip_keys else q.new_empty(shape) for shape in shapes]
        lses, deltas = lse.new_empty(*row_shape), lse.new_empty(*row_shape)
        described = descriptors_of(key_boxes, k, v) if key_boxes else (None, None)
        with device_of(q):
            rows(out, grad, lse, lses, deltas)
            if needs_queries:
                queries(q, k, v, grad, lses, deltas, dq, *integer_tensors, table, *described)
            if needs_keys and keys is not None:
                described = descriptors_of(row_boxes, q, grad) if row_boxes else (None, None)
                keys(q, k, v, grad, lses, deltas, dk, dv, *integer_tensors[:4], *described)
        return dq, dk, dv, gpu.gradient_of_sinks(sinks, lse, deltas)

    return launch
