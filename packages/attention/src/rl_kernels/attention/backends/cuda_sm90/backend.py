"""The backend ``cuda-sm90`` of det_attention: tiles of scores in CUDA C++.

``attention_sm90.cu`` defines the order of the sums, which is the contract of this backend: blocks of 128 keys, segments
of 1024.
"""

from __future__ import annotations

from rl_kernels.attention.backends.cuda_sm90 import passes
from rl_kernels.attention.backends.cuda_sm90.schedule import (
    CODES,
    HEIGHT,
    WIDTHS,
    BackwardTile,
    backward_program,
    program,
    tile_of,
)
from rl_kernels.attention.gpu import RawOps
from rl_kernels.core.cuda.program import Program

_raw_ops = RawOps(passes)
forward, backward, planned = _raw_ops.forward, _raw_ops.backward, _raw_ops.planned


def programs(arch: str) -> list[Program]:
    """Return the programs compiled for a target: all of them for ``sm_90a``, none for others."""
    if arch != "sm_90a":
        return []
    kinds = [
        (dtype, (width, width_v), capped)
        for dtype in CODES
        for width in WIDTHS
        for width_v in WIDTHS
        for capped in (False, True)
    ]
    return [
        *(
            program(dtype, tile_of(rows, widths), capped=cap)
            for rows in (HEIGHT, HEIGHT + 1)
            for dtype, widths, cap in kinds
        ),
        *(backward_program(dtype, BackwardTile(widths), capped=cap) for dtype, widths, cap in kinds),
    ]
