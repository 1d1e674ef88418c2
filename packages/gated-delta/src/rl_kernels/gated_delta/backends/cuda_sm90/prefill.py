"""Host code of ``prepare_sm90.cu`` and ``scan_sm90.cu``: any number of tokens of any layout."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.gpu import device_of, processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs

PACKAGE = "rl_kernels.gated_delta.backends.cuda_sm90"
SIZE = 128
"""Dk and Dv of the kernels."""
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernels' DTYPE, and of the dtypes of g and beta."""
PLACES = "PPPiiiiii"
"""Layout of ``struct Places``."""
PREPARE_ARGS, SCAN_ARGS = f"({PLACES}PPPPPPPPPPqqqqqqiiiiii%s)", f"T({PLACES}PPPPPPPPPPiifi)"
"""Layouts of the kernels' ``struct Args``; for gradients, that of ``prepare`` has four pointers more."""
BOX = CHUNK * 128
"""Bytes of a box of 64 rows of 64 numbers."""
UNITS, ITEM = 4 * BOX, 3 * BOX + 8 * CHUNK
"""Bytes of what ``prepare`` writes for a chunk of a key head and of a value head."""
HEADS, PREPARE_THREADS = 2, 128
"""Value heads and threads of a block of ``prepare``."""
SYSTEM = CHUNK * 272
"""Bytes of shared memory of the system of a head."""
STAGES, WIDTH = 3, 64
"""Chunks in the ring of ``scan``, and value columns of a part."""


def prepare_program(dtype: torch.dtype, *, for_gradients: bool) -> Program:
    """Return the kernel that needs no state."""
    numbers = (("DTYPE", CODES[dtype]), ("GRADIENTS", int(for_gradients)))
    return Program(PACKAGE, "prepare_sm90.cu", "sm_90a", numbers)


def pass_program(file: str, dtype: torch.dtype, parts: int, stages: int = STAGES) -> Program:
    """Return a pass over chunks, whose blocks have one or both halves of the value columns."""
    numbers = (("DTYPE", CODES[dtype]), ("PARTS", parts), ("STAGES", stages))
    return Program(PACKAGE, file, "sm_90a", numbers)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    halves = (torch.bfloat16, torch.float16) if arch == "sm_90a" else ()
    return [
        form
        for x in halves
        for form in (
            prepare_program(x, for_gradients=False),
            *(pass_program("scan_sm90.cu", x, parts) for parts in (1, 2)),
        )
    ]


def fits(x: torch.Tensor) -> bool:
    """Say whether kernels read ``x[B, T, H, D]`` by 16 bytes, and TMA by boxes."""
    per = ALIGNED // x.element_size()
    return x.stride(3) == 1 and not x.data_ptr() % ALIGNED and all(step and not step % per for step in x.stride()[:3])


def whole(count: int) -> int:
    """Return a number of bytes, filled up to whole atoms of a swizzle."""
    return -(-count // 1024) * 1024


class Chunks:
    """The launch that needs no state, and the sizes of passes over chunks, for calls of one kind.

    Args:
        inputs: the arguments.
        is_cached: whether sequences go on from a cache.
        for_gradients: whether the backward pass runs it.
    """

    def __init__(self, inputs: Inputs, *, is_cached: bool = False, for_gradients: bool = False) -> None:
        q, k, v, g, beta = inputs[:5]
        batch, self.tokens, key_heads, _ = q.shape
        sequences, heads = inputs.sequences, v.shape[2]
        self.is_empty = not (sequences and batch and self.tokens)
        self._fits = [fits(x) for x in (q, k, v)]
        if self.is_empty:
            return
        chunks = -(-(self.tokens + (CHUNK - 1) * is_cached) // CHUNK)
        packed = inputs.cu_seqlens is not None
        self.slots = self.tokens // CHUNK + 2 * sequences if packed else sequences * chunks
        self._heads, self._tail = (key_heads, heads), (sequences, heads, CHUNK, CHUNK)
        wide = [int(x is not None and x.dtype == torch.int64) for x in (inputs.cu_seqlens, inputs.start)]
        self._numbers = (*wide, self.tokens, chunks, sequences, 0)
        self.places = self.tokens, chunks, sequences, sequences.bit_length()
        self._form = int(inputs.normalize_qk), CODES[g.dtype], CODES[beta.dtype], 0
        self._parts = 1 if 2 * sequences * heads <= processors(v.get_device()) else 2
        program = prepare_program(q.dtype, for_gradients=for_gradients)
        self._prepare = kernel(program, "prepare", PREPARE_ARGS % ("PPPP" if for_gradients else ""), q.device)
        group = heads // key_heads
        self._prepare_grid = self.slots * key_heads * -(-group // HEADS)
        self._grid = sequences, heads, SIZE // WIDTH // self._parts
        self._threads = 160 if self._parts == 1 else 384

    def readable(self, arguments: tuple[Any, ...]) -> Inputs:
        """Return the arguments of forward, with copies of what kernels cannot read."""
        rows = (readable(x, fit) for x, fit in zip(arguments, self._fits, strict=False))
        numbers = (None if x is None else x.contiguous() for x in arguments[3:8])
        return Inputs._make((*rows, *numbers, *arguments[8:]))

    def _places(self, inputs: Inputs, lengths: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Return the members of ``struct Places``."""
        return inputs.cu_seqlens, inputs.start, lengths, *self._numbers

    def _launch_prepare(
        self,
        inputs: Inputs,
        places: tuple[Any, ...],
        held: tuple[Any, ...] = (None,) * 3,
        tail: torch.Tensor | None = None,
        others: tuple[torch.Tensor, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch what needs no state, and return what passes read of key heads and of value heads.

        ``held`` has keys, sums and T of a cache, or None for each; T of last chunks is written to ``tail``. For
        gradients ``others`` are rows of queries and keys, sums and inverses, which are written too.
        """
        q, k, _, g, beta = inputs[:5]
        key_heads, heads = self._heads
        units = q.new_empty(self.slots * key_heads * UNITS, dtype=torch.uint8)
        items = q.new_empty(self.slots * heads * ITEM, dtype=torch.uint8)
        strides = *q.stride()[:3], *k.stride()[:3]
        self._prepare.launch(
            self._prepare_grid, PREPARE_THREADS, *places, q, k, g, beta, *held, units, items, tail, *strides,
            *self._heads, *self._form, *others, shared=UNITS + HEADS * SYSTEM,
        )  # fmt: skip
        return units, items


class Plan(Chunks):
    """The launches of prefill for calls of one kind.

    Args:
        inputs: the arguments.
        is_cached: whether sequences go on from a cache.
    """

    def __init__(self, inputs: Inputs, *, is_cached: bool) -> None:
        super().__init__(inputs, is_cached=is_cached)
        if self.is_empty:
            return
        program = pass_program("scan_sm90.cu", inputs.q.dtype, self._parts)
        self._scan = kernel(program, "scan", SCAN_ARGS, inputs.q.device)
        self._shared = STAGES * whole(UNITS + self._parts * BOX + ITEM) + 1024

    def run(self, arguments: tuple[Any, ...], state: torch.Tensor | None, cache: tuple[Any, ...]) -> torch.Tensor:
        """Launch, and return the output; ``cache`` has the tensors of a ``DeltaCache`` or None for each."""
        inputs = self.readable(arguments[:COUNT])
        v, initial = inputs.v, inputs.initial_state
        held_state, keys, residuals, decays, inverse, lengths = cache
        initial = held_state if initial is None else initial
        out = v.new_empty(v.shape) if inputs.start is None else v.new_zeros(v.shape)
        tail = None if lengths is None else decays.new_empty(self._tail)
        places = self._places(inputs, lengths)
        with device_of(v):
            units, items = self._launch_prepare(inputs, places, (keys, decays, inverse), tail)
            passed = (units, items, tail, initial, state, out, keys, residuals, decays, inverse)
            v_map = tensor_map(v, (1, CHUNK, 1, WIDTH), swizzle=128)
            self._scan.launch(
                self._grid, self._threads, v_map, *places, *passed, *self._heads, inputs.scale, 0, shared=self._shared
            )
        return out
