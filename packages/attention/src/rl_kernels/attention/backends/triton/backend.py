"""det_attention in Triton: the launches of the forward and the backward pass.

The reduction order is the contract of this backend. Keys are counted from the first key of their sequence and taken in
blocks of 64. Each segment of 1024 keys has its own state, and states are merged in ascending order. A warp group
multiplies 64 keys at once with registers to spare at every head size. Segments of 1024 keys keep the merges below a few
percent of a prompt's time, and cut a cache of 32768 keys into enough programs to fill a GPU.
"""

from __future__ import annotations

import torch

from rl_kernels.attention.backends.triton.passes import (
    ALIGNED,
    is_apart,
    launch_backward,
    launch_forward,
    of_sinks,
    plan_for,
)
from rl_kernels.attention.backends.triton.planned import planned
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.gpu import device_of

__all__ = ["backward", "forward", "planned"]


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with contiguous heads at 16-byte aligned addresses: the given one, or a copy.

    The layout of a kernel's loads then depends on sizes alone.
    """
    if is_apart(x.shape, x.stride()) and x.data_ptr() % ALIGNED == 0:
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _fitting(given: Inputs) -> Inputs:
    """Return the arguments in layouts that the kernels read, copied where needed."""
    operands = map(_canonical, given.operands)
    others = (None if x is None else x.contiguous() for x in given.others)
    return Inputs(*operands, *others, *given.numbers)  # type: ignore[arg-type]


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for the arguments of ``Inputs``."""
    given = _fitting(Inputs(*arguments))  # type: ignore[arg-type]
    packed = given.cu_seqlens_q is not None
    shape = (*given.q.shape[:-1], given.v.shape[-1])
    # Without validation some rows may be in no sequence: they get 0.
    out = given.q.new_zeros(shape) if packed else given.q.new_empty(shape)
    lse = given.q.new_empty(given.lse_shape(), dtype=torch.float32)
    if packed:
        lse.fill_(-torch.inf)
    plan = plan_for(given)
    if not plan.is_empty:
        launch_forward(plan, given, out, lse)
    return out, lse


def backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, the gradient of out and ``needs_keys``."""
    *inputs, out, lse, grad, needs_keys = arguments
    given = Inputs(*inputs)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert isinstance(grad, torch.Tensor)
    packed = given.cu_seqlens_q is not None
    dq = given.q.new_zeros(given.q.shape) if packed else given.q.new_empty(given.q.shape)
    # Rows in no sequence, and keys without a query, get zeros.
    covered = given.cu_seqlens_k is None and given.k_start is None and bool(given.q.numel())
    dk, dv = (
        (x.new_empty(x.shape) if covered else x.new_zeros(x.shape)) if needs_keys else x.new_empty(0)
        for x in (given.k, given.v)
    )
    fitting = _fitting(given)
    plan = plan_for(fitting)
    *lead, _, queries = lse.shape
    lses, deltas = (lse.new_empty((*lead, plan.kv_heads, queries, plan.group)) for _ in range(2))
    if not plan.is_empty:
        saved = (_canonical(out.contiguous()), lse.contiguous(), lses, deltas, _canonical(grad))
        with device_of(given.q):
            launch_backward(plan, fitting, *saved, (dq, dk, dv) if needs_keys else (dq, None, None))
    dsinks = of_sinks(given.sinks, lse, deltas)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks
