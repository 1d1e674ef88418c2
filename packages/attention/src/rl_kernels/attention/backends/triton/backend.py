"""det_attention in Triton: what is launched, forward and backward.

The order of the sums, which is the contract of this backend: keys are counted from the first of their sequence and
taken in blocks of 64; a segment of 1024 keys starts a state of its own, and states are merged in ascending order. 64
keys are what a warp group multiplies at once with registers to spare at every head size; 1024 keys keep the merges
below a few percent of a prompt's time, and cut a cache of 32768 keys into enough programs to fill a GPU.
"""

from __future__ import annotations

import functools

import torch

from rl_kernels.attention import sinks as sink
from rl_kernels.attention.backends.triton.backward import rows_of
from rl_kernels.attention.backends.triton.boxes import UNIT, described
from rl_kernels.attention.backends.triton.dkdv import of_keys
from rl_kernels.attention.backends.triton.dq import of_queries
from rl_kernels.attention.backends.triton.forward import attend, finish
from rl_kernels.attention.backends.triton.plan import BLOCK, PACKED_DIMS, plan_of, units
from rl_kernels.attention.inputs import Inputs
from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import ceil_div, launch

ALIGNED = 16
"""Bytes of which addresses and strides are multiples."""


class _Call:
    """The tensors of a call as the kernels read them, and its plan."""

    def __init__(self, given: Inputs) -> None:
        self.q, self.k, self.v = q, k, v = _canonical(given.q), _canonical(given.k), _canonical(given.v)
        self.sinks, self.table = _contiguous(given.sinks), _contiguous(given.block_table)
        self.where = (
            *(_contiguous(given.cu_seqlens_q), _contiguous(given.cu_seqlens_k), _contiguous(given.k_start)),
            *(_contiguous(given.seqused_q), _contiguous(given.seqused_k)),
        )
        self.plan = plan_of(
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
            (q.dtype, q.device),
            given.batch,
            given.cu_seqlens_k is not None,
            given.k_start is not None,
            None if self.table is None else self.table.shape,
            (given.max_seqlen_q, given.max_seqlen_k),
            (given.scale, given.left, given.right, given.softcap),
        )
        self.boxes = described(self.plan.boxes, k, v)


def _contiguous(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.contiguous()


@functools.lru_cache(maxsize=4096)
def _is_apart(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Say whether heads lie in one piece, and begin at multiples of 8 elements from the first."""
    *outer, last = zip(strides, shape, strict=True)
    return last[0] == 1 and all(stride % UNIT == 0 for stride, size in outer if size > 1)


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose heads lie in one piece, and at addresses for wide loads; a copy if they do not.

    How a kernel lays out its loads then follows from sizes alone.
    """
    if _is_apart(x.shape, x.stride()) and x.data_ptr() % ALIGNED == 0:
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def forward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for the arguments of ``Inputs``."""
    given = Inputs(*arguments)  # type: ignore[arg-type]
    packed = given.cu_seqlens_q is not None
    shape = (*given.q.shape[:-1], given.v.shape[-1])
    # Rows that are in no sequence, where nobody validated that there are none.
    out = given.q.new_zeros(shape) if packed else given.q.new_empty(shape)
    lse = given.q.new_empty(given.lse_shape(), dtype=torch.float32)
    if packed:
        lse.fill_(-torch.inf)
    call = _Call(given)
    if call.plan.is_empty:
        return out, lse
    plan = call.plan.forward
    states: tuple[torch.Tensor | None, ...] = (None, None, None)
    if plan.states:
        sizes = (1, 1, call.plan.width_v)
        states = tuple(out.new_empty(plan.states * size, dtype=torch.float32) for size in sizes)
    with device_of(given.q):
        launch(
            attend,
            plan.grid,
            *(call.q, call.k, call.v, out, lse, call.sinks, *call.where, call.table, *call.boxes, *states),
            numbers=plan.numbers,
            **plan.tile.options,
        )
        if plan.states:
            launch(
                finish,
                plan.grid_finish,
                *(out, lse, call.sinks, *call.where, *states),
                numbers=plan.numbers_finish,
                num_warps=1,
            )
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
    # Rows of no sequence, and keys where no query is, get zeros.
    covered = given.cu_seqlens_k is None and given.k_start is None and bool(given.q.numel())
    dk, dv = (
        (x.new_empty(x.shape) if covered else x.new_zeros(x.shape)) if needs_keys else x.new_empty(0)
        for x in (given.k, given.v)
    )
    call = _Call(given)
    *lead, _, queries = lse.shape
    lses, deltas = (lse.new_empty((*lead, call.plan.kv_heads, queries, given.group)) for _ in range(2))
    if not call.plan.is_empty:
        saved = (_canonical(out), lse.contiguous(), lses, deltas, _canonical(grad))
        with device_of(given.q):
            _gradients(call, *saved, (dq, dk, dv), bool(needs_keys))
    return dq, dk, dv, sink.gradient(given.sinks, lse, deltas.mT.flatten(-3, -2))


def _gradients(
    call: _Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    lses: torch.Tensor,
    deltas: torch.Tensor,
    grad: torch.Tensor,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    needs_keys: bool,
) -> None:
    plan, rows = call.plan, 32
    of_grad, heads = units(grad.stride()), plan.kv_heads * plan.group
    launch(
        rows_of,
        (ceil_div(plan.queries * heads, rows) * (1 if out.ndim == PACKED_DIMS else out.shape[0]),),
        *(out, grad, lse, lses, deltas),
        numbers=(plan.queries, of_grad[0], heads, plan.group, plan.size_v, plan.width_v, *of_grad[1:], rows),
        num_warps=4,
    )
    tile = plan.tile_of_queries
    common = (*plan.strides, of_grad[0], plan.factor, plan.scale, plan.cap, plan.rate)
    constants = (*plan.constants, *of_grad[1:])
    tiles = plan.tiles(tile.rows)
    launch(
        of_queries,
        (plan.batch * tiles, plan.kv_heads),
        *(call.q, call.k, call.v, grad, lses, deltas, into[0], *call.where, call.table, *call.boxes),
        numbers=(
            *(plan.queries, plan.keys, plan.pages, plan.table_step, tiles, *plan.window),
            *(*common, *constants, plan.page, plan.capped, tile.rows, BLOCK, plan.has_left),
        ),
        **tile.options,
    )
    keys = plan.tile_of_keys
    tiles = ceil_div(plan.longest_k, keys.keys)
    if needs_keys and tiles:
        boxes = described(plan.boxes_of_rows(keys.rows, grad.shape, grad.stride()), call.q, grad)
        launch(
            of_keys,
            (plan.batch * tiles, plan.kv_heads),
            *(call.q, call.k, call.v, grad, lses, deltas, *into[1:], *call.where[:4], *boxes),
            numbers=(
                *(plan.queries, plan.keys, tiles, *plan.window),
                *(*common, *constants, plan.capped, keys.rows, keys.keys, plan.has_left),
            ),
            num_warps=keys.warps,
            num_stages=keys.stages,
        )
