"""The products that ``rl-kernels compile`` compiles: each schedule that may be chosen, for aligned operands and output.

All other products are compiled at first use: those with other operands, or with output dtypes that no gradient has;
swapped schedules that continue a chain, or whose operands both have contiguous rows and whose output is FP32, which a
gradient needs only for at most 64 rows in several parts, or for at most 64 rows of a weight. Products in segments of K
are compiled ahead if the left operand has contiguous terms and the output has the operands' dtype, or FP32 for other
ranks.
"""

from __future__ import annotations

import torch

from rl_kernels.core.cuda.gemm.plan import BOXES, BY_STRIDES, HALVES, TRANSPOSED, program
from rl_kernels.core.cuda.gemm.schedule import K_MAJOR, MN_MAJOR, Schedule, candidates, operands_of
from rl_kernels.core.cuda.gemm.segmented import SEGMENTS, fits, in_segments
from rl_kernels.core.cuda.program import Program

ARCH = "sm_90a"


def programs_of(arch: str) -> list[Program]:
    """Return the programs of whole products for a target: all for ``sm_90a``, none for others."""
    majors = [(left, right) for left in (K_MAJOR, MN_MAJOR) for right in (K_MAJOR, MN_MAJOR)]
    cuts = [(cut, pair) for cut in (candidate.schedule for candidate in candidates()) for pair in majors]
    return [
        program(dtype, out, cut, cut.depth(pair[1]), pair, stored, continues)
        for dtype in (HALVES if arch == ARCH else ())
        for cut, pair in cuts
        if cut.fitted(*pair) == cut
        for out, stored, continues in _outputs_of(cut, pair, dtype)
    ]


def segmented_of(arch: str) -> list[Program]:
    """Return the programs of products in segments of K for a target: all for ``sm_90a``, none for others."""
    cuts = [candidate.schedule for segments in SEGMENTS for candidate in in_segments(segments)]
    layouts = [(cut, (K_MAJOR, right)) for cut in cuts for right in (K_MAJOR, MN_MAJOR)]
    fitting = [(cut, operands_of(cut, majors)) for cut, majors in layouts if fits(cut, majors)]
    return [
        program(dtype, out, cut, cut.depth(pair[1]), pair, stored, False)
        for dtype in (HALVES if arch == ARCH else ())
        for cut, pair in fitting
        if cut.fitted(*pair) == cut
        for out, stored in ((dtype, _store_mode(cut)), (torch.float32, _fp32_store_mode(cut)))
    ]


def _outputs_of(cut: Schedule, majors: tuple[int, int], dtype: torch.dtype) -> list[tuple[torch.dtype, int, bool]]:
    """Return (dtype, store mode, continues) of each aligned output: in the operands' dtype; for gradients in FP32 too.

    Gradients are ``dc @ weight``, whose right operand is read along its rows, and unswapped also ``a^T @ dc``.
    """
    own = (dtype, _store_mode(cut), False)
    if cut.swapped:
        return [own, (torch.float32, _fp32_store_mode(cut), False)] if majors == (MN_MAJOR, K_MAJOR) else [own]
    if majors[1] != MN_MAJOR:
        return [own]
    return [own, *((torch.float32, _fp32_store_mode(cut), continues) for continues in (False, True))]


def _store_mode(cut: Schedule) -> int:
    """Return the store mode of an aligned output in the operands' dtype."""
    return BY_STRIDES if not cut.in_boxes else TRANSPOSED if cut.swapped else BOXES


def _fp32_store_mode(cut: Schedule) -> int:
    """Return the store mode of an aligned output in FP32."""
    return BOXES if cut.in_boxes and not cut.swapped else BY_STRIDES
