"""gated_delta_rule in Triton: the launches of prefill and decode; ``backward`` has those of the backward pass.

The reduction order is the contract of this backend; ``tiles``, ``scan``, ``decode``, ``reverse`` and ``differentiate``
state it. Prefill, a chunk of any length with a cache, and packed sequences take four launches: sums of decays,
normalized rows, products of all chunks, and the pass over chunks. One token of each sequence takes two launches: what
does not depend on columns of the state, and its row.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.gated_delta import launches
from rl_kernels.gated_delta.backends.triton import decode
from rl_kernels.gated_delta.backends.triton.backward import backward
from rl_kernels.gated_delta.backends.triton.plan import Plan, unreadable, with_copies
from rl_kernels.gated_delta.backends.triton.schedule import part_of_keys, tile_of_decode
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs

__all__ = ["backward", "continued", "forward"]


@prepared
def forward(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]``, and the states after the last tokens, empty unless they are asked for."""
    inputs, with_state = Inputs(*arguments[:COUNT]), arguments[COUNT]
    return launches.whole(Plan(inputs), inputs, with_state)


@prepared
def continued(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]`` of sequences that go on from a cache, and write to the cache."""
    inputs = Inputs(*arguments[:COUNT])
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None and inputs.start is None:
        return _one_token(inputs)
    return launches.pieces(Plan(inputs, is_cached=True))


def _one_token(inputs: Inputs) -> Launches:
    q, k, v = inputs[:3]
    copied = unreadable(inputs)
    q, k, v = with_copies((q, k, v), copied, shapes_only=True)
    q_strides, k_strides, v_strides = ((x.stride(0), x.stride(2)) for x in (q, k, v))
    batch, sizes = q.shape[0], (q.shape[2], v.shape[2], q.shape[3], v.shape[3])
    key_heads, heads, size, value_size = sizes
    tile = tile_of_decode(q.dtype, size, value_size)
    numbers = (*q_strides, *k_strides, *sizes[:3], inputs.normalize_qk)
    weigh = Launch(decode.weigh, (heads, batch), numbers, num_warps=4)
    grid = (value_size // tile.width, heads, batch)
    columns = (tile.width, part_of_keys(q.dtype, size))
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    step = Launch(decode.decode, grid, (*v_strides, *sizes, *columns), **options)

    def launch(*args: Any) -> torch.Tensor:
        q, k, v, g, beta = with_copies(args[:5], copied)
        state, keys, residuals, decays, inverse, lengths = args[COUNT:]
        out = v.new_empty(v.shape)
        if out.numel():
            unit_q, mixing = q.new_empty((batch, key_heads, size)), v.new_empty((batch, heads, CHUNK))
            shared = (unit_q, mixing, torch.empty_like(lengths))
            with device_of(q):
                weigh(q, k, g, beta, keys, decays, inverse, lengths, *shared)
                step(v, out, state, keys, residuals, decays, inverse, lengths, *shared, args[8])
        return out

    return launch
