"""gated_delta_rule in Triton: the launches of prefill and decode. The backward pass is that of ``native``, in PyTorch.

The reduction order is the contract of this backend; ``tiles``, ``scan`` and ``decode`` state it. Prefill, a chunk of
any length with a cache, and packed sequences take three launches: sums of decays, products and inverses of all chunks,
and the pass over chunks. One token of each sequence takes a launch of its own, and one that counts it.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import Launch, ceil_div, next_power_of_2
from rl_kernels.gated_delta.backends.triton import decode, prepare, scan
from rl_kernels.gated_delta.backends.triton.schedule import tile_of_decode, tile_of_scan, warps_of_prepare
from rl_kernels.gated_delta.constants import BLOCK, CHUNK
from rl_kernels.gated_delta.gradients import backward
from rl_kernels.gated_delta.inputs import COUNT, Inputs


__all__ = ["backward", "continued", "forward"]


class Plan:
    """The launches for calls of one kind.

    Args:
        inputs: the arguments.
        is_cached: whether sequences go on from a cache.
    """

    def __init__(self, inputs: Inputs, *, is_cached: bool) -> None:
        q, _, v = inputs[:3]
        self.sequences, self.tokens = inputs.sequences, q.shape[1]
        self.sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
        self.copied = unreadable(inputs)
        key_heads, heads, size, value_size = self.sizes
        self.is_empty = not (self.sequences and q.shape[0] and self.tokens)
        self.chunks = ceil_div(self.tokens + (CHUNK - 1) * is_cached, CHUNK)
        packed = self.tokens // CHUNK + 2 * self.sequences
        self.slots = self.sequences * self.chunks if inputs.cu_seqlens is None else packed
        if self.is_empty:
            return
        places = (self.tokens, self.chunks, self.sequences, self.sequences.bit_length())
        strides = [stride for x in with_copies(inputs[:3], self.copied, shapes_only=True) for stride in x.stride()[:3]]
        self.sum_decays = Launch(
            prepare.sum_decays, (self.slots,), (*places, heads, next_power_of_2(heads)), num_warps=1
        )
        numbers = (*places, *strides[:6], key_heads, heads, size, inputs.normalize_qk)
        grid = (self.slots, heads)
        self.prepare = Launch(prepare.prepare, grid, numbers, num_warps=warps_of_prepare(size))
        tile = tile_of_scan(q.dtype, size, value_size)
        numbers = (*places[:2], *strides[6:], *self.sizes, tile.width)
        grid = (value_size // tile.width, heads, self.sequences)
        self.scan = Launch(scan.scan, grid, numbers, num_warps=tile.warps, num_stages=tile.stages)

    def run(self, arguments: tuple[Any, ...], state: torch.Tensor | None, cache: tuple[Any, ...]) -> torch.Tensor:
        """Launch; ``cache`` has the tensors of a ``DeltaCache`` or None for each."""
        inputs = Inputs._make(with_copies(arguments[:COUNT], self.copied))
        q, k, v, g, beta, initial, *places, scale, _ = inputs
        key_heads, heads, size, value_size = self.sizes
        initial, keys, values, decays, inverse, lengths = (cache[0] if cache[0] is not None else initial, *cache[1:])
        sums = q.new_empty((self.slots, heads, CHUNK), dtype=torch.float32)
        unit_q, unit_k = (q.new_empty((self.slots, key_heads, CHUNK, size)) for _ in range(2))
        below, scores = (q.new_empty((self.slots, heads, CHUNK, CHUNK)) for _ in range(2))
        inverses = q.new_empty((self.slots, heads, CHUNK, BLOCK), dtype=torch.float32)
        out = v.new_zeros(v.shape) if places[1] is not None else v.new_empty(v.shape)
        places = [*places, lengths]
        with device_of(q):
            self.sum_decays(g, sums, decays, *places)
            self.prepare(q, k, beta, sums, unit_q, unit_k, below, scores, inverses, keys, inverse, *places)
            matrices = (unit_q, unit_k, v, beta, sums, below, scores, inverses)
            self.scan(*matrices, initial, out, state, keys, values, decays, inverse, *places, scale)
        return out


NO_CACHE = (None,) * 6


@prepared
def forward(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]``, and the states after the last tokens, empty unless they are asked for."""
    inputs, with_state = Inputs(*arguments[:COUNT]), arguments[COUNT]
    plan = Plan(inputs, is_cached=False)
    shape = inputs.state_shape

    def launch(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        v, initial = args[2], args[5]
        state = v.new_empty(shape if with_state else 0, dtype=torch.float32)
        if plan.is_empty:
            if with_state:
                state.zero_() if initial is None else state.copy_(initial)
            return v.new_zeros(v.shape), state
        return plan.run(args, state if with_state else None, NO_CACHE), state

    return launch


@prepared
def continued(*arguments: Any) -> Launches:
    """Return the output ``[B, T, Hv, Dv]`` of sequences that go on from a cache, and write to the cache."""
    inputs = Inputs(*arguments[:COUNT])
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None and inputs.start is None:
        return _one_token(inputs)
    plan = Plan(inputs, is_cached=True)

    def launch(*args: Any) -> torch.Tensor:
        v, bounds, start = args[2], args[6], args[7]
        if plan.is_empty:
            return v.new_zeros(v.shape)
        cache = args[COUNT:]
        out = plan.run(args, cache[0], cache)
        cache[-1].add_(plan.tokens if bounds is start is None else plan.tokens - start if bounds is None else bounds.diff())
        return out

    return launch


def _one_token(inputs: Inputs) -> Launches:
    q, k, v = inputs[:3]
    copied = unreadable(inputs)
    q, k, v = with_copies((q, k, v), copied, shapes_only=True)
    strides = [stride for x in (q, k, v) for stride in (x.stride(0), x.stride(2))]
    sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
    tile = tile_of_decode(q.dtype, *sizes[2:])
    numbers = (*strides, *sizes, tile.width, inputs.normalize_qk)
    grid = (sizes[3] // tile.width, sizes[1], q.shape[0])
    step = Launch(decode.decode, grid, numbers, num_warps=tile.warps, num_stages=tile.stages)

    def launch(*args: Any) -> torch.Tensor:
        q, k, v, g, beta = with_copies(args[:5], copied)
        out = v.new_empty(v.shape)
        if out.numel():
            with device_of(q):
                step(q, k, v, g, beta, out, *args[COUNT:], args[8])
            args[-1].add_(1)
        return out

    return launch


def unreadable(inputs: Inputs) -> tuple[int, ...]:
    """Return the places of operands that kernels read only from a copy."""
    rows = [place for place, x in enumerate(inputs[:3]) if x.stride(3) != 1]
    whole = [place for place, x in enumerate(inputs) if 3 <= place <= 5 and x is not None and not x.is_contiguous()]
    return *rows, *whole


def with_copies(arguments: Any, copied: tuple[int, ...], *, shapes_only: bool = False) -> list[Any]:
    """Return the arguments with contiguous copies at the places ``copied``; with ``shapes_only`` copy no data."""
    copies = list(arguments)
    for place in copied:
        if place < len(copies):
            x = copies[place]
            copies[place] = x.new_empty(x.shape) if shapes_only else x.contiguous()
    return copies
