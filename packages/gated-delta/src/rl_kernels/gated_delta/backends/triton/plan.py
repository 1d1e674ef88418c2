"""The launches of prefill: of what needs no state, for all chunks at once, and of the pass over chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import Launch, ceil_div, next_power_of_2
from rl_kernels.gated_delta.backends.triton import prepare, scan
from rl_kernels.gated_delta.backends.triton.schedule import Tile, part_of_keys, tile_of_scan
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs


class Chunks(NamedTuple):
    """What the kernels of ``prepare`` write; their docstrings have the shapes."""

    unit_q: torch.Tensor
    unit_k: torch.Tensor
    sums: torch.Tensor
    mixing: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor


class Plan:
    """The launches for calls of one kind.

    Args:
        inputs: the arguments.
        is_cached: whether sequences go on from a cache.
        for_gradients: whether ``backward`` runs it.
    """

    def __init__(self, inputs: Inputs, *, is_cached: bool = False, for_gradients: bool = False) -> None:
        q, _, v = inputs[:3]
        self.sequences, self.tokens = inputs.sequences, q.shape[1]
        self.sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
        self.for_gradients = for_gradients
        self.copied = unreadable(inputs)
        key_heads, heads, size, value_size = self.sizes
        self.is_empty = not (self.sequences and q.shape[0] and self.tokens)
        self.chunks = ceil_div(self.tokens + (CHUNK - 1) * is_cached, CHUNK)
        packed = self.tokens // CHUNK + 2 * self.sequences
        self.slots = self.sequences * self.chunks if inputs.cu_seqlens is None else packed
        if self.is_empty:
            return
        places = (self.tokens, self.chunks, self.sequences, self.sequences.bit_length())
        shapes = with_copies(inputs[:3], self.copied, shapes_only=True)
        strides = tuple(stride for x in shapes for stride in x.stride()[:3])
        self.sum_decays = Launch(
            prepare.sum_decays, (self.slots,), (*places, heads, next_power_of_2(heads)), num_warps=1
        )
        numbers = (*places, *strides[:6], key_heads, size, inputs.normalize_qk)
        self.normalize = Launch(prepare.normalize, (self.slots, key_heads), numbers, num_warps=4)
        numbers = (*places, key_heads, heads, size, part_of_keys(q.dtype, size), for_gradients)
        self.prepare = Launch(prepare.prepare, (self.slots, heads), numbers, num_warps=2, num_stages=2)
        self.places, self.strides, self.v_strides = places, (strides[:3], strides[3:6]), strides[6:]
        tile = tile_of_scan(q.dtype, size, value_size, tiles_change_no_bit(q.device))
        self.scan = self.over_chunks(scan.scan, tile, *strides[6:])

    def over_chunks(self, kernel: Any, tile: Tile, *numbers: int) -> Launch:
        """Return the launch of a pass over the chunks of each sequence."""
        grid = (self.sizes[3] // tile.width, self.sizes[1], self.sequences)
        numbers = (*self.places[:2], *numbers, *self.sizes, tile.width)
        return Launch(kernel, grid, numbers, num_warps=tile.warps, num_stages=tile.stages)

    def empty_chunks(self, q: torch.Tensor) -> Chunks:
        """Return tensors for what ``sum_decays``, ``normalize`` and ``prepare`` write."""
        key_heads, heads, size, _ = self.sizes
        unit_q = q.new_empty((self.slots, key_heads, CHUNK, size))
        return Chunks(
            unit_q,
            torch.empty_like(unit_q),
            q.new_empty((self.slots, heads, CHUNK), dtype=torch.float32),
            q.new_empty((self.slots, heads, CHUNK, CHUNK)),
            q.new_empty((self.slots, heads, CHUNK, size)),
            q.new_empty((self.slots, heads, CHUNK, CHUNK), dtype=torch.float32),
        )

    def run(self, arguments: tuple[Any, ...], state: torch.Tensor | None, cache: tuple[Any, ...]) -> torch.Tensor:
        """Launch; ``cache`` has the tensors of a ``DeltaCache`` or None for each."""
        inputs = Inputs._make(with_copies(arguments[:COUNT], self.copied))
        q, k, v, g, beta, initial = inputs[:6]
        held_state, keys, residuals, decays, inverse, lengths = cache
        places = (inputs.cu_seqlens, inputs.start, lengths)
        initial = initial if held_state is None else held_state
        out = v.new_empty(v.shape) if inputs.start is None else v.new_zeros(v.shape)
        chunks = self.empty_chunks(q)
        unit_q, unit_k, *rest = chunks
        with device_of(v):
            self.sum_decays(g, chunks.sums, decays, *places)
            self.normalize(q, k, unit_q, unit_k, keys, *places)
            self.prepare(unit_q, unit_k, beta, *rest, inverse, *places)
            held = (keys, residuals, decays, inverse)
            self.scan(unit_q, unit_k, v, *rest, initial, out, state, *held, *places, inputs.scale)
        return out


def unreadable(inputs: Inputs) -> tuple[int, ...]:
    """Return the places of operands that kernels read only from a copy."""
    rows = [place for place, x in enumerate(inputs[:3]) if x.stride(3) != 1]
    whole = [place for place, x in enumerate(inputs[:8]) if place >= 3 and x is not None and not x.is_contiguous()]
    return *rows, *whole


def with_copies(arguments: Any, copied: tuple[int, ...], *, shapes_only: bool = False) -> list[Any]:
    """Return the arguments with contiguous copies at the places ``copied``; with ``shapes_only`` copy no data."""
    copies = list(arguments)
    for place in copied:
        if place < len(copies):
            x = copies[place]
            copies[place] = x.new_empty(x.shape) if shapes_only else x.contiguous()
    return copies
