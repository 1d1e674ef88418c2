"""Host code shared by the kernels of ``cuda-sm90``: how rows are cut into tiles, and the common arguments.

The device side is ``linear_logp.cuh``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from rl_kernels.core.constants import UNIT
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import TensorMap, tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.tuned import entry
from rl_kernels.linear_logp.inputs import Inputs, cap_of, number_or_rows
from rl_kernels.linear_logp.vocabulary import BLOCK, units

PACKAGE = "rl_kernels.linear_logp.backends.cuda_sm90"
FORWARD, BACKWARD = "linear_logp_sm90.cu", "linear_logp_backward_sm90.cu"
CODES = {torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernels' DTYPE macro."""
INPUTS, CAP, LEAST = "PPPPqiiiiiifi", "ffff", "P"
"""Layout of ``struct Inputs``, and of the fields at its end if logits are capped, and if they have thresholds."""
BLOCKS = UNIT // BLOCK
"""Blocks of a unit."""
HEIGHT, INNER, SWIZZLE = 64, 64, 128
"""Rows of a consumer, terms of D in a stage, bytes of a swizzled row."""
WARPGROUP, ALIGNMENT = 128, 1024
SHARED = 227 * 1024
"""Bytes of shared memory available to a block."""
STAGE = (HEIGHT + BLOCK) * SWIZZLE
"""Bytes of a stage."""
CACHE_SIZE = 4096
"""Number of addresses at which the tensor maps of a launch are forgotten."""
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
    file: str,
    dtype: torch.dtype,
    cut: Cut,
    *,
    entropy: bool,
    capped: bool = False,
    keeps: bool = False,
    min_logit: bool = False,
) -> Program:
    """Return the kernels of a file, compiled for the tiles of ``cut``."""
    stages = {"STAGES": cut.stages(stores=keeps or file == BACKWARD), "STAGE_BYTES": STAGE}
    flags = {"ENTROPY": int(entropy), "CAPPED": int(capped), "MIN_LOGIT": int(min_logit)}
    if file == FORWARD:
        flags["KEEPS"] = int(keeps)
    defines = {"DTYPE": CODES[dtype], **flags, "GROUPS": cut.groups, **stages}
    return Program(PACKAGE, file, "sm_90a", tuple(defines.items()))


def variant(inputs: Inputs) -> dict[str, bool]:
    """Return the arguments of ``program`` that say which fields ``struct Inputs`` has at its end."""
    return {"capped": inputs.cap is not None, "min_logit": inputs.min_logit is not None}


class Fields:
    """The members of ``struct Inputs`` for rows of one kind.

    Attributes:
        cut: how rows are cut into tiles.
        form: layout of the members, as a launch takes it.
    """

    def __init__(self, inputs: Inputs) -> None:
        (count, size), columns = inputs.hidden.shape, inputs.weight.shape[0]
        cut, ignores = Cut.of(count), inputs.ignore_index is not None
        self.cut, self.form, self._ignores = cut, INPUTS + (CAP if inputs.cap else ""), ignores
        self.form += "" if inputs.min_logit is None else LEAST
        self._sizes = inputs.ignore_index or 0, count, columns, size, inputs.start, inputs.vocab, _group()
        self._tiles, self._sort = -(-count // cut.rows), None
        if ignores and count > cut.rows:
            compiled = program(FORWARD, inputs.hidden.dtype, cut, entropy=False)
            self._sort = kernel(compiled, "sort_tiles", f"({INPUTS})P", inputs.hidden.device)

    def of(self, inputs: Inputs) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        """Return the members as numbers, and a tensor that must live until the kernel is launched.

        Inputs are in the layouts of ``read``; the temperature is a number or one for each row.
        """
        ids, scale, bias, cap = inputs.target_ids.data_ptr(), inputs.temperature, inputs.bias, inputs.cap
        per_row, order = isinstance(scale, torch.Tensor), None
        numbers = *self._sizes, 1.0 if per_row else scale, self._ignores
        if self._sort is not None:
            order = inputs.target_ids.new_empty(1 + self._tiles, dtype=torch.int32)
            self._sort.start((1, 1, 1), 1024, 0, False, (0, 0, ids, 0, *numbers, order.data_ptr()))
        pointers = (
            *(0 if bias is None else bias.data_ptr(), scale.data_ptr() if per_row else 0, ids),
            0 if order is None else order.data_ptr(),
        )
        limits = () if cap is None else (*cap, 1 / cap.softcap, cap.softcap * cap.rate)
        least = () if inputs.min_logit is None else (inputs.min_logit.data_ptr(),)
        return (*pointers, *numbers, *limits, *least), order


class Maps:
    """The tensor maps of a launch for tensors of one kind, remembered by their addresses alone."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], tuple[TensorMap, ...]] = {}

    def of(self, hidden: torch.Tensor, weight: torch.Tensor, tile: torch.Tensor | None = None) -> tuple[TensorMap, ...]:
        """Return the maps of the operands, which are ``copyable``, and of what tiles are stored to."""
        addresses = hidden.data_ptr(), weight.data_ptr(), 0 if tile is None else tile.data_ptr()
        maps = self._maps.get(addresses)
        if maps is None:
            if len(self._maps) >= CACHE_SIZE:
                self._maps.clear()
            operands = ((hidden, (HEIGHT, INNER)), (weight, (BLOCK, INNER)))
            stored = () if tile is None else ((tile, (HEIGHT, SWIZZLE // tile.itemsize)),)
            maps = tuple([tensor_map(x, box, swizzle=SWIZZLE) for x, box in (*operands, *stored)])
            self._maps[addresses] = maps
        return maps


def read(*args: Any, **more: Any) -> Inputs:
    """Return the inputs of a raw op in the layouts that kernels read; hidden states and what is saved as they are."""
    hidden, weight, ids, bias, temperature, ignore_index, cap, least, *saved = args
    ids = (ids if ids.dtype == torch.int64 else ids.to(torch.int64)).contiguous()
    operands = hidden, copyable(weight), ids, None if bias is None else bias.contiguous(), number_or_rows(temperature)
    return Inputs(*operands, ignore_index, cap_of(cap), None if least is None else least.contiguous(), *saved, **more)


@functools.cache
def _group() -> int:
    return entry(PACKAGE, "cuda", "group", kind=int)


def copyable(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy of it, with rows that begin at multiples of 16 bytes, as TMA requires."""
    row, column = x.stride()
    is_aligned = not (row * x.itemsize | x.data_ptr()) % ALIGNED
    return readable(x, is_aligned and column == 1 and row >= x.shape[1])
