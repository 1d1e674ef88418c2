"""Launch the kernels of a pass, on tensors in a layout that they read."""

from __future__ import annotations

import torch

from rl_kernels.attention.backends.triton.boxes import descriptors_of
from rl_kernels.attention.backends.triton.plan import Plan, plan_of
from rl_kernels.attention.gpu import Saved
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.gpu import device_of

WRITES_ALL = False
"""The kernels write rows and keys of sequences only."""


def plan_for(inputs: Inputs) -> Plan:
    """Return the plan for the sizes and strides of a call."""
    q, k, v = inputs.operands
    return plan_of(
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.dtype, q.device),
        inputs.batch,
        inputs.cu_seqlens_k is not None,
        inputs.k_start is not None,
        None if inputs.block_table is None else inputs.block_table.shape,
        (inputs.max_seqlen_q, inputs.max_seqlen_k),
        (inputs.scale, inputs.left, inputs.right, inputs.softcap),
        tuple([None if x is None else x.dtype for x in inputs.optional_tensors]),
    )


def launch_forward(plan: Plan, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write out, and lse unless it is None, for the rows that are in a sequence."""
    sinks, *integer_tensors, table = inputs.optional_tensors
    attend, finish, count = plan.forward(with_lse=lse is not None)
    states: tuple[torch.Tensor | None, ...] = (None, None, None)
    if count:
        sizes = (1, 1, plan.width_v)
        states = tuple([out.new_empty(count * size, dtype=torch.float32) for size in sizes])
    q, k, v = inputs.operands
    with device_of(q):
        attend(q, k, v, out, lse, sinks, *integer_tensors, table, *descriptors_of(plan.boxes, k, v), *states)
        if count:
            finish(out, lse, sinks, *integer_tensors, *states)


def launch_backward(plan: Plan, inputs: Inputs, saved: Saved, into: tuple[torch.Tensor | None, ...]) -> None:
    """Fill ``lses`` and ``deltas``; write the gradients of q and, unless their outputs are None, of k and v."""
    out, lse, lses, deltas, grad = saved
    (q, k, v), (_, *integer_tensors, table) = inputs.operands, inputs.optional_tensors
    dq, dk, dv = into
    rows, queries, keys, boxes = plan.backward(grad.stride(), grad.dtype, out.dtype, lse.dtype)
    rows(out, grad, lse, lses, deltas)
    queries(q, k, v, grad, lses, deltas, dq, *integer_tensors, table, *descriptors_of(plan.boxes, k, v))
    if dk is not None and keys is not None:
        keys(q, k, v, grad, lses, deltas, dk, dv, *integer_tensors[:4], *descriptors_of(boxes, q, grad))
