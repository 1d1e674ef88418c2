"""Host code of ``decode_sm90.cu``: one token of each sequence with a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import COUNT, Inputs

PACKAGE = "rl_kernels.gated_delta.backends.cuda_sm90"
SIGNATURE = "(PPPPPPPPPPPPqqqqqqiiiiif)"
"""``struct Args``."""
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of dtypes."""
WARP, BITS, SIZE = 32, 32, 128
FIXED = 45328
"""Bytes of shared memory apart from residuals."""


class Schedule(NamedTuple):
    """The division of a value head's work; no bit depends on it.

    Attributes:
        parts: blocks that share its columns.
        tiles: 16 columns each, of a warp.
        blocks: blocks of a multiprocessor.
        spread: whether warps have roles of their own.
    """

    parts: int
    tiles: int
    blocks: int
    spread: int

    @property
    def threads(self) -> int:
        """Threads of a block: warps for all columns, and six for other roles that are spread."""
        return WARP * (SIZE // (16 * self.tiles * self.parts) + 6 * self.spread)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: ``struct Shared``."""
        return FIXED + CHUNK * (2 * SIZE // self.parts + ALIGNED)


SCHEDULES = Schedule(4, 1, 1, 1), Schedule(2, 1, 1, 1), Schedule(1, 2, 3, 0)
"""Of few value heads, of twice as many, and of more."""


def schedule_of(heads: int, multiprocessors: int) -> Schedule:
    """Choose the schedule by the value heads of all sequences: parts for as many multiprocessors as there are."""
    fitting = [schedule for schedule in SCHEDULES if schedule.parts * heads <= multiprocessors]
    return fitting[0] if fitting else SCHEDULES[-1]


def program(dtype: torch.dtype, schedule: Schedule) -> Program:
    """Return the kernel for operands of a dtype."""
    sizes = {name.upper(): value for name, value in schedule._asdict().items()}
    numbers = {"DTYPE": CODES[dtype], **sizes, "SHARED": schedule.shared}
    return Program(PACKAGE, "decode_sm90.cu", "sm_90a", tuple(numbers.items()))


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    if arch != "sm_90a":
        return []
    return [program(dtype, schedule) for dtype in (torch.bfloat16, torch.float16) for schedule in SCHEDULES]


def one_token(inputs: Inputs) -> Launches:
    """Return the launch of ``continued`` for one token of each sequence, with heads of 128."""
    copied = tuple(place for place, x in enumerate(inputs[:5]) if not _reads(x, is_row=place < 3))
    shapes = [_copy(x, place in copied) for place, x in enumerate(inputs[:5])]
    batch, _, heads, size = inputs.v.shape
    device, key_heads = inputs.v.device, inputs.k.shape[2]
    if not inputs.v.numel():
        return lambda *args: args[2].new_empty(args[2].shape)
    schedule = schedule_of(batch * heads, processors(device.index))
    start = kernel(program(inputs.q.dtype, schedule), "decode", SIGNATURE, device).start
    group, shape = heads // key_heads, (batch, 1, heads, size)
    grid, block, shared = (schedule.parts * group, key_heads, batch), schedule.threads, schedule.shared
    # Bits of lengths that hold a length, at least 23 (constants.MOST_TOKENS); those above count the blocks of a
    # sequence while the kernel runs.
    shift = BITS - (heads * schedule.parts).bit_length()
    strides = [stride for x in shapes[:3] for stride in (x.stride(0), x.stride(2))]
    codes = [CODES[x.dtype] for x in inputs[3:5]]
    numbers = (*strides, group, *codes, int(inputs.normalize_qk), shift, inputs.scale)

    def launch(*args: Any) -> torch.Tensor:
        q, k, v, g, beta = [_copy(x, place in copied) for place, x in enumerate(args[:5])] if copied else args[:5]
        state, keys, residuals, decays, inverse, lengths = args[COUNT:]
        out: torch.Tensor = v.new_empty(shape)
        start(
            grid, block, shared, True,
            (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), out.data_ptr(),
                state.data_ptr(), keys.data_ptr(), residuals.data_ptr(), decays.data_ptr(), inverse.data_ptr(),
                lengths.data_ptr(), *numbers,
            ),
        )  # fmt: skip
        return out

    return launch


def _reads(x: torch.Tensor, *, is_row: bool) -> bool:
    """Say whether the kernel reads an operand as it is: rows in chunks of 16 bytes, other operands as a whole."""
    if not is_row:
        return x.is_contiguous()
    strides = [stride * x.element_size() % ALIGNED for stride in (x.stride(0), x.stride(2))]
    return x.stride(3) == 1 and not any(strides) and not x.data_ptr() % ALIGNED


def _copy(x: torch.Tensor, is_copied: bool) -> torch.Tensor:
    return readable(x, not is_copied)
