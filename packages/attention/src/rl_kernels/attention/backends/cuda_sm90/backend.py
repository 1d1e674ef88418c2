"""The backend ``cuda-sm90`` of det_attention: tiles of scores in CUDA C++.

``attention_sm90.cu`` defines the order of the sums, which is the contract of this backend: blocks of 128 keys, or of 64
with values wider than 128, in segments of 1024. The kernels also write rows and keys that are in no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rl_kernels.attention import gpu
from rl_kernels.attention.backends.cuda_sm90.plan import LEAST, SEGMENT, Plan, strides_of
from rl_kernels.attention.backends.cuda_sm90.schedule import (
    CODES,
    HEIGHT,
    PART,
    WIDTHS,
    BackwardTile,
    backward_program,
    is_wide,
    program,
    tile_of,
)
from rl_kernels.attention.checks import MULTIPLE
from rl_kernels.attention.inputs import INTEGER_TENSORS, Inputs
from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import TensorMap, tensor_map
from rl_kernels.core.gpu import device_of, processors

SHAPE = "PPPPPP" + 17 * "i"
"""Layout of ``struct Shape``."""
ARGS = f"({SHAPE}PPPPPqqqPiiiifff)"
"""Layout of ``struct Args`` of the forward pass."""
BACKWARD_ARGS = f"({SHAPE}PPPPPPPqqqqqqPiiffff)"
ROWS_ARGS = "(PPPPPPqqqiiii)"
"""Layouts of ``struct Args`` and ``struct Rows`` of the backward pass."""
LANES, THREADS = 16, 256
"""Lanes of a row, and threads of a thread block, of the kernel that sums out times its gradient."""
WARPS = 4
"""Warps of a thread block that merges states; each warp has one row."""
SHARING = 4
"""Largest number of thread blocks per pair of a section, where tiles of the forward pass differ in work: the blocks of
a pair share its keys and values in the L2 cache."""
SWIZZLE, SPAN = 128, 64
"""Bytes, and 16-bit numbers, of a row of a box in shared memory."""
DIMS = 4
"""Dims of a descriptor: packed tensors get a first one of size 1."""


def _forward(*arguments: Any, with_lse: bool) -> Launches:
    """Return (out, lse), or out alone, for the arguments of ``Inputs``."""
    copied = gpu.unreadable(arguments, expanded=False)
    read = gpu.as_read(arguments, copied)
    inputs = Inputs._make(read)
    plan, out_shape, lse_shape = Plan(inputs), inputs.out_shape(), inputs.lse_shape()
    if plan.is_empty:
        return gpu.forward_without_queries(out_shape, lse_shape, with_lse=with_lse)
    tile, multiprocessors = tile_of(plan.rows, plan.widths), processors(plan.device)
    tiles, segments = -(-plan.rows // tile.rows), -(-plan.longest_k // SEGMENT)
    count = tiles * plan.batch * plan.kv_heads
    # One consumer merges no segments; two leave them to more thread blocks only if half of these would idle.
    split = segments > 1 and (tile.groups == 1 or 2 * count <= multiprocessors)
    parts = segments if split else 1
    section = plan.section(plan.longest_k, multiprocessors // SHARING if plan.is_masked else LEAST)
    # An even number, so that the sums behind the tops and totals are aligned.
    state_rows = min(tile.rows, plan.rows + plan.rows % 2)
    state_size = count * segments * state_rows * (2 + tile.widths[1]) if split else 0
    grid, finish_grid = min(count * parts, multiprocessors), (plan.batch, -(-plan.rows // WARPS), plan.kv_heads)
    if is_wide(tile.widths) and tile.groups > 1 and not split and plan.most_k > SEGMENT:
        # Each thread block's sums of earlier segments, also where a sequence is longer than the caller says.
        state_size = grid * tile.rows * tile.widths[1]
    # Packed sequences and caches differ in their tiles: thread blocks claim these from a counter.
    claims = (inputs.seqused_k is not None or inputs.cu_seqlens_q is not None) and count * parts > multiprocessors
    threads, shared, tile_program = tile.threads, tile.shared, program(plan.dtype, tile, capped=plan.cap[0] > 0)
    attend = kernel(tile_program, "attend", f"TT{ARGS}", plan.device)
    finish = kernel(tile_program, "finish", ARGS, plan.device) if split else None
    shape, strides = plan.shape(plan.box), plan.strides
    numbers = (tiles, parts, section, state_rows, plan.factor, *plan.cap)
    k_map, v_map = (_map_of(read, place, (1, plan.box, 1, SPAN)) for place in (gpu.K, gpu.V))
    # The kernels read FP32 or the dtype of the operands.
    widens_sinks = inputs.sinks is not None and inputs.sinks.dtype != plan.dtype

    def launch(*args: Any) -> Any:
        args = gpu.with_copies(args, copied) if copied else args
        q, _, _, sinks = args[:4]
        sinks = sinks.float() if widens_sinks else sinks
        out = q.new_empty(*out_shape)
        lse = q.new_empty(*lse_shape, dtype=torch.float32) if with_lse else None
        states = q.new_empty(state_size, dtype=torch.float32) if state_size else None
        counter = q.new_zeros(1, dtype=torch.int32) if claims else None
        rest = (*args[INTEGER_TENSORS], *shape, q, out, lse, sinks, states, *strides, counter, *numbers)
        attend.launch(grid, threads, k_map(args), v_map(args), *rest, shared=shared)
        if finish is not None:
            finish.launch(finish_grid, 32 * WARPS, *rest, pdl=True)
        return out if lse is None else (out, lse)

    return launch


forward, output = prepared(partial(_forward, with_lse=True)), prepared(partial(_forward, with_lse=False))


@prepared
def backward(*arguments: Any) -> Launches:
    """Return (dq, dk, dv, dsinks) for the arguments of ``Inputs``, out, lse, out's gradient, and what is needed."""
    copied = gpu.unreadable(arguments, expanded=False)
    read = gpu.as_read(arguments, copied)
    *fields, _, lse, grad, needs_queries, needs_keys = read
    inputs = Inputs._make(fields)
    if needs_keys and inputs.block_table is not None:
        raise ValueError("block_table: expected None, keys on pages have no gradients")
    plan = Plan(inputs)
    if plan.is_empty:
        return gpu.backward_without_queries
    tile, multiprocessors = BackwardTile(plan.widths), processors(plan.device)
    threads, shared = tile.threads, tile.shared
    tile_program = backward_program(plan.dtype, tile, capped=plan.cap[0] > 0)
    rows = kernel(tile_program, "rows_of", ROWS_ARGS, plan.device)
    queries = kernel(tile_program, "of_queries", f"TT{BACKWARD_ARGS}", plan.device) if needs_queries else None
    keys = kernel(tile_program, "of_keys", f"TTTT{BACKWARD_ARGS}", plan.device) if needs_keys and plan.keys else None
    sequences = 1 if inputs.cu_seqlens_q is not None else plan.batch
    rows_grid = sequences * -(-plan.queries * plan.heads * LANES // THREADS)
    # One tile at least, for keys in no sequence.
    row_tiles, key_tiles = -(-plan.rows // tile.height), max(-(-plan.longest_k // tile.height), 1)
    queries_grid, keys_grid = (min(x * plan.batch * plan.kv_heads, multiprocessors) for x in (row_tiles, key_tiles))
    query_numbers = plan.backward_numbers(row_tiles, plan.longest_k, multiprocessors)
    key_numbers = plan.backward_numbers(key_tiles, plan.rows, multiprocessors)
    query_shape, key_shape = plan.shape(plan.backward_box), plan.shape(PART)
    strides, grad_strides, row_shape = plan.strides, strides_of(grad.stride()), gpu.row_shape(lse, plan.kv_heads)
    sizes = (plan.queries, plan.heads, plan.group, plan.size_v)
    k_map, v_map = (_map_of(read, place, (1, plan.backward_box, 1, SPAN)) for place in (gpu.K, gpu.V))
    block = (1, plan.queries_of_block, plan.group, SPAN)
    q_map, grad_map = (_map_of(read, place, block) for place in (gpu.Q, gpu.GRAD))
    has_padding = inputs.k_start is not None

    def launch(*args: Any) -> tuple[torch.Tensor, ...]:
        args = gpu.with_copies(args, copied) if copied else args
        q, k, v, sinks = args[:4]
        out, lse, grad, *_ = args[gpu.OUT :]
        dq = q.new_empty(q.shape if needs_queries else 0)
        shapes = (k.shape, v.shape) if needs_keys else (0, 0)
        # Padding gets zeros.
        dk, dv = [q.new_zeros(shape) if has_padding else q.new_empty(shape) for shape in shapes]
        lses, deltas = lse.new_empty(*row_shape), lse.new_empty(*row_shape)
        counters = lse.new_empty(2, dtype=torch.int32)
        query_counter, key_counter = counters.unbind()
        integer_tensors, maps = args[INTEGER_TENSORS], (k_map(args), v_map(args))
        rest = (q, grad, lses, deltas, dq, dk, dv, *strides, *grad_strides)
        with device_of(q):
            rows.launch(rows_grid, THREADS, out, grad, lse, lses, deltas, counters, *grad_strides, *sizes)
            if queries is not None:
                query_args = (*integer_tensors, *query_shape, *rest, query_counter, *query_numbers)
                queries.launch(queries_grid, threads, *maps, *query_args, shared=shared)
            if keys is not None:
                row_maps = q_map(args), grad_map(args)
                key_args = (*integer_tensors, *key_shape, *rest, key_counter, *key_numbers)
                keys.launch(keys_grid, threads, *maps, *row_maps, *key_args, shared=shared)
        return dq, dk, dv, gpu.gradient_of_sinks(sinks, lse, deltas)

    return launch


def _map_of(arguments: Sequence[Any], place: int, box: tuple[int, ...]) -> Callable[[Sequence[Any]], TensorMap]:
    """Return a function that makes the descriptor of one argument of a call.

    An empty tensor, from which nothing is copied, gets the descriptor of q.
    """
    place = place if arguments[place].numel() else gpu.Q
    x = arguments[place]
    is_packed = x.dim() < DIMS
    batched = x[None] if is_packed else x
    # The stride of a dim of size 1 may be any number, but a descriptor does not accept any.
    legal = tuple(MULTIPLE if size == 1 else step for size, step in zip(batched.shape, batched.stride(), strict=True))
    strides = None if legal == batched.stride() else legal

    def make(args: Sequence[Any]) -> TensorMap:
        x = args[place]
        return tensor_map(x[None] if is_packed else x, box, swizzle=SWIZZLE, strides=strides)

    return make


def programs(arch: str) -> list[Program]:
    """Return the programs compiled for a target: all of them for ``sm_90a``, none for others."""
    if arch != "sm_90a":
        return []
    kinds = [(dtype, widths, capped) for dtype in CODES for widths in WIDTHS for capped in (False, True)]
    return [
        *(
            program(dtype, tile_of(rows, widths), capped=cap)
            for rows in (HEIGHT, HEIGHT + 1)
            for dtype, widths, cap in kinds
        ),
        *(backward_program(dtype, BackwardTile(widths), capped=cap) for dtype, widths, cap in kinds),
    ]
