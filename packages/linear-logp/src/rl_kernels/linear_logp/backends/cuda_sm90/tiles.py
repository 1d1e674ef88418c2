"""What the kernels of ``cuda-sm90`` have in common on the host: how rows are cut into tiles, and what all of them take.

The device side of it is ``kernels/linear_logp.cuh``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import TensorMap, tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.core.tuned import entry
from rl_kernels.linear_logp.inputs import Inputs

PACKAGE = "rl_kernels.linear_logp.backends.cuda_sm90"
FORWARD, BACKWARD = "linear_logp_sm90.cu", "linear_logp_backward_sm90.cu"
CODES = {torch.bfloat16: 1, torch.float16: 2}
"""DTYPE of the kernels."""
INPUTS, CAP = "PPPPqiiiifi", "ffff"
"""``struct Inputs``, and what it ends with where logits are capped."""
BLOCK, UNIT = 256, 4
"""Columns of a block, and blocks that one part holds where there are enough of them to fill the GPU."""
HEIGHT, INNER, SWIZZLE, CHUNK = 64, 64, 128, 16
"""Rows of a consumer, terms of D of a stage, bytes of its swizzled rows, and what addresses are multiples of."""
WARPGROUP, ALIGNMENT = 128, 1024
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
STAGE = (HEIGHT + BLOCK) * SWIZZLE
"""Bytes of a stage."""
BOXES = 2 * HEIGHT * SWIZZLE
"""Bytes of the boxes through which a consumer's part of dz leaves."""


class Cut(NamedTuple):
    """How rows are cut: ``groups`` times 64 of them, each with a consumer of its own, make a tile."""

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

    def stages(self, file: str) -> int:
        """Return the stages that there is room for."""
        return (SHARED - ALIGNMENT - self._boxes(file)) // STAGE

    def shared(self, file: str) -> int:
        """Return the bytes of dynamic shared memory of a block."""
        return self.stages(file) * STAGE + self._boxes(file) + ALIGNMENT

    def blocks(self, count: int, vocab: int, device: int) -> int:
        """Return the blocks of a part of the forward pass: one where whole units would leave multiprocessors idle."""
        units = -(-count // self.rows) * -(-vocab // (BLOCK * UNIT))
        return UNIT if units >= 8 * processors(device) else 1

    def grid(self, count: int, units: int, device: int) -> int:
        """Return the number of blocks for so many rows and units of columns."""
        return min(-(-count // self.rows) * units, processors(device))

    def _boxes(self, file: str) -> int:
        return self.groups * BOXES if file == BACKWARD else 0


@functools.cache
def program(file: str, dtype: torch.dtype, cut: Cut, *, entropy: bool, capped: bool = False) -> Program:
    """Return the kernels of a file for tiles that are cut like this."""
    stages = {"STAGES": cut.stages(file), "STAGE_BYTES": STAGE}
    flags = {"ENTROPY": int(entropy), "CAPPED": int(capped)}
    defines = {"DTYPE": CODES[dtype], **flags, "GROUPS": cut.groups, **stages}
    return Program(PACKAGE, file, "sm_90a", tuple(defines.items()))


class Operands(NamedTuple):
    """What every kernel takes.

    Attributes:
        cut: how rows are cut.
        maps: of hidden and weight.
        form: of the arguments, as a launch takes it.
        arguments: ``struct Inputs``.
    """

    cut: Cut
    maps: tuple[TensorMap, TensorMap]
    form: str
    arguments: tuple[object, ...]

    @classmethod
    def of(cls, inputs: Inputs, hidden: torch.Tensor) -> Operands:
        """Return those of a call whose weight is ``copyable``, as ``hidden`` is, that of the inputs or a copy."""
        (count, size), vocab = hidden.shape, len(inputs.weight)
        cut, device = Cut.of(count), hidden.device
        ids = inputs.target_ids.to(torch.int64).contiguous()
        per_row, ignores = inputs.temperature.ndim > 0, inputs.ignore_index is not None
        bias = None if inputs.bias is None else inputs.bias.contiguous()
        temperatures = inputs.temperature.contiguous() if per_row else None
        group, temperature = _group(), 1.0 if per_row else float(inputs.temperature)
        numbers = (inputs.ignore_index or 0, count, vocab, size, group, temperature, ignores)
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


@functools.cache
def _group() -> int:
    return entry(PACKAGE, "cuda", "group", kind=int)


def copyable(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows begin at multiples of 16 bytes, as the copy engine wants them: itself, or a copy."""
    size = x.element_size()
    fits = x.stride(1) == 1 and x.stride(0) * size % CHUNK == 0 and x.stride(0) >= x.shape[1]
    if fits and x.data_ptr() % CHUNK == 0:
        return x
    # A single row is contiguous whatever its stride, which clone would keep.
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
