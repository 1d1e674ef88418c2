"""Host code shared by the kernels of ``cuda-sm90``: how rows are cut into tiles, and the common arguments.

The device side is ``linear_logp.cuh``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from rl_kernels.core.constants import UNIT
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import TensorMap, tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.tuned import entry
from rl_kernels.linear_logp.inputs import Inputs
from rl_kernels.linear_logp.vocabulary import BLOCK, units

PACKAGE = "rl_kernels.linear_logp.backends.cuda_sm90"
FORWARD, BACKWARD = "linear_logp_sm90.cu", "linear_logp_backward_sm90.cu"
CODES = {torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernels' DTYPE macro."""
INPUTS, CAP = "PPPPqiiiiiifi", "ffff"
"""Layout of ``struct Inputs``, and of the fields at its end if logits are capped."""
BLOCKS = UNIT // BLOCK
"""Blocks of a unit."""
HEIGHT, INNER, SWIZZLE = 64, 64, 128
"""Rows of a consumer, terms of D in a stage, bytes of a swizzled row."""
WARPGROUP, ALIGNMENT = 128, 1024
SHARED = 227 * 1024
"""Bytes of shared memory available to a block."""
STAGE = (HEIGHT + BLOCK) * SWIZZLE
"""Bytes of a stage."""
BOXES = 2 * HEIGHT * SWIZZLE
"""Bytes of the shared-memory boxes through which one consumer stores its part of dz, or of kept logits."""


class Cut(NamedTuple):
    """How rows are cut into tiles: a tile has ``groups`` groups of 64 rows, each with its own consumer."""

    groups: int

    @classmethod
    def of(cls, count: int) -> Cut:
        """Choose the tile cut for ``count`` rows; it changes no bit."""
        return cls(1 if count <= HEIGHT else 2)

    @property
    def rows(self) -> int:
        """Return the rows of a tile."""
        return self.groups * HEIGHT

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return (self.groups + 1) * WARPGROUP

    def stages(self, *, stores: bool) -> int:
        """Return how many stages fit in shared memory; ``stores``: tiles are stored, through boxes."""
        return (SHARED - ALIGNMENT - self._boxes(stores)) // STAGE

    def shared(self, *, stores: bool) -> int:
        """Return the bytes of dynamic shared memory of a block."""
        return self.stages(stores=stores) * STAGE + self._boxes(stores) + ALIGNMENT

    def blocks(self, count: int, vocab: int, device: int) -> int:
        """Return the vocabulary blocks of a part in the forward pass: 1 if units would leave multiprocessors idle."""
        tiles = -(-count // self.rows) * units(vocab)
        return BLOCKS if tiles >= 8 * processors(device) else 1

    def grid(self, count: int, across: int, device: int) -> int:
        """Return the number of thread blocks for ``count`` rows and ``across`` parts of the columns."""
        return min(-(-count // self.rows) * across, processors(device))

    def _boxes(self, stores: bool) -> int:
        return self.groups * BOXES if stores else 0


@functools.cache
def program(
    file: str, dtype: torch.dtype, cut: Cut, *, entropy: bool, capped: bool = False, keeps: bool = False
) -> Program:
    """Return the kernels of a file, compiled for the tiles of ``cut``."""
    stages = {"STAGES": cut.stages(stores=keeps or file == BACKWARD), "STAGE_BYTES": STAGE}
    flags = {"ENTROPY": int(entropy), "CAPPED": int(capped)}
    if file == FORWARD:
        flags["KEEPS"] = int(keeps)
    defines = {"DTYPE": CODES[dtype], **flags, "GROUPS": cut.groups, **stages}
    return Program(PACKAGE, file, "sm_90a", tuple(defines.items()))


class Operands(NamedTuple):
    """The arguments that every kernel takes.

    Attributes:
        cut: how rows are cut into tiles.
        maps: TMA tensor maps of hidden and weight.
        form: layout of the arguments, as a launch takes it.
        arguments: the fields of ``struct Inputs``.
    """

    cut: Cut
    maps: tuple[TensorMap, TensorMap]
    form: str
    arguments: tuple[object, ...]

    @classmethod
    def of(cls, inputs: Inputs, hidden: torch.Tensor) -> Operands:
        """Return the operands of a call; ``hidden`` (or its copy) and the weight are already ``copyable``."""
        (count, size), vocab = hidden.shape, inputs.weight.shape[0]
        cut, device = Cut.of(count), hidden.device
        bias = None if inputs.bias is None else inputs.bias.contiguous()
        temperatures, ids, numbers = fields(inputs, count, vocab, size)
        ignores = inputs.ignore_index is not None
        order = None
        if ignores and count > cut.rows:
            order = torch.empty(1 + -(-count // cut.rows), dtype=torch.int32, device=device)
            made = program(FORWARD, hidden.dtype, cut, entropy=False)
            sort = kernel(made, "sort_tiles", f"({INPUTS})P", device)
            sort.launch(1, 1024, *(None, None, ids, None, *numbers), order)
        maps = (
            tensor_map(hidden, (HEIGHT, INNER), swizzle=SWIZZLE),
            tensor_map(inputs.weight, (BLOCK, INNER), swizzle=SWIZZLE),
        )
        cap = inputs.cap and (*inputs.cap, 1 / inputs.cap.softcap, inputs.cap.softcap * inputs.cap.rate)
        return cls(cut, maps, INPUTS + (CAP if cap else ""), (bias, temperatures, ids, order, *numbers, *(cap or ())))


def fields(
    inputs: Inputs, count: int, columns: int, size: int
) -> tuple[torch.Tensor | None, torch.Tensor, tuple[object, ...]]:
    """Return of ``struct Inputs`` the temperatures of rows (or None), the ids, and the numbers."""
    ids = inputs.target_ids.to(torch.int64).contiguous()
    per_row, ignores = inputs.temperature.ndim > 0, inputs.ignore_index is not None
    temperatures = inputs.temperature.contiguous() if per_row else None
    group, temperature = _group(), 1.0 if per_row else float(inputs.temperature)
    shard = columns, size, inputs.start, inputs.vocab
    return temperatures, ids, (inputs.ignore_index or 0, count, *shard, group, temperature, ignores)


@functools.cache
def _group() -> int:
    return entry(PACKAGE, "cuda", "group", kind=int)


def copyable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy of it, with rows that begin at multiples of 16 bytes, as TMA requires."""
    size = x.element_size()
    fits = x.stride(1) == 1 and x.stride(0) * size % ALIGNED == 0 and x.stride(0) >= x.shape[1]
    return readable(x, fits and x.data_ptr() % ALIGNED == 0)
