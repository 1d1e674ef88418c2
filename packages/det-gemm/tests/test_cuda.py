"""The host code of the CUDA C++ backend: its programs and schedules."""

from itertools import product

import pytest
import torch

from rl_kernels.core.cuda import where
from rl_kernels.core.cuda.gemm.plan import MatrixLayout, plan_of
from rl_kernels.core.cuda.gemm.schedule import (
    FEW,
    K_MAJOR,
    MN_MAJOR,
    PLAIN,
    Candidate,
    Schedule,
    candidates,
    schedule_for,
)
from rl_kernels.core.cuda.gemm.segmented import fits, in_segments, schedule_of_segments
from rl_kernels.core.operator import Call
from rl_kernels.det_gemm.op import OPERATOR
from rl_kernels.det_gemm.segments import segment_length

TABLE = [candidate.schedule for candidate in candidates()]
SEGMENTED = [candidate.schedule for count in (2, 4, 8) for candidate in in_segments(count)]
MAJORS = list(product((K_MAJOR, MN_MAJOR, PLAIN), repeat=2))
ALIGNED = [pair for pair in MAJORS if PLAIN not in pair]
SHAPES = list(product((1, 8, 33, 64, 65, 1000, 8192), (1, 64, 1280, 57344), (0, 16, 4104, 8192)))
RARE = ((256, 28472, 13856), (8192, 1088, 5496))
"""With 8 segments sums of one wait in global memory; with 4 the other has three stages, the fewest."""
SHARED = (227 << 10) - 1024


def test_programs_of_each_target():
    backend = OPERATOR.backend("cuda-sm90").load()
    programs = backend.programs("sm_90a")
    assert len(set(programs)) == len(programs) > 2 * 4 * sum(not one.schedule.swapped for one in candidates())
    assert {program.arch for program in programs} == {"sm_90a"}
    assert not any(backend.programs(arch) for arch in ("sm_80", "sm_90", "sm_100a"))


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_programs_of_a_layer_are_compiled_ahead(segments):
    programs = set(OPERATOR.backend("cuda-sm90").load().programs("sm_90a"))

    def compiled(dtype, m, n, k, right, out=None, left="rows", continues=False):
        strides = {"rows": (k, 1), "columns": (1, m)}[left], {"rows": (n, 1), "columns": (1, k)}[right]
        a, b = MatrixLayout((m, k), strides[0], dtype, True), MatrixLayout((k, n), strides[1], dtype, True)
        target, length = MatrixLayout((m, n), (n, 1), out or dtype, True), segment_length(k, segments)
        plan = plan_of(a, b, target, 132, continues=continues, segments=segments, length=length)
        return plan.program in programs

    shapes = [(m, n, k) for m, n, k in (*SHAPES, *RARE) if k and n % 8 == 0 and k % 8 == 0]
    for dtype, (m, n, k) in product((torch.bfloat16, torch.float16), shapes):
        # Forward, and the gradient of the input; in segments, FP32 partials go to other ranks.
        assert all(compiled(dtype, m, n, k, right) for right in ("rows", "columns"))
        assert compiled(dtype, m, n, k, "rows", torch.float32)
        if segments > 1:
            assert compiled(dtype, m, n, k, "columns", torch.float32)
        elif m > FEW and m % 8 == 0:
            # The gradient of the weight, and main_grad.
            assert all(compiled(dtype, m, n, k, "rows", torch.float32, "columns", more) for more in (False, True))


def test_cubins_are_searched_in_the_packages_of_the_programs(monkeypatch):
    asked = []
    monkeypatch.setattr(where, "missing", lambda packages, *_: asked.append(packages))
    backend = OPERATOR.backend("cuda-sm90")
    backend.why_not(Call(torch.device("cuda", 0), torch.bfloat16, "sm90", {"K": 64, "N": 64}))
    assert set(asked[0]) == {program.package for program in backend.load().programs("sm_90a")}


def test_limits_of_cuda_sm90(monkeypatch):
    monkeypatch.setattr(where, "missing", lambda *_: None)
    limits = OPERATOR.backend("cuda-sm90").limits
    for dtype, k, n, reason in (
        (torch.float32, 64, 64, "FP32"),
        (torch.bfloat16, 63, 64, "K = 63"),
        (torch.float16, 64, 65, "N = 65"),
    ):
        assert reason in limits(Call(torch.device("cuda", 0), dtype, "sm90", {"K": k, "N": n}))
    assert limits(Call(torch.device("cuda", 0), torch.float16, "sm90", {"K": 64, "N": 72})) is None


def test_schedules_fit_into_shared_memory():
    for cut, majors in product(TABLE, MAJORS):
        fitted = cut.fitted(*majors)
        assert fitted.shared(majors[1]) <= SHARED
        # The instruction reads 64 rows of 128 bytes of every tile, those of the last stage too.
        read = fitted.depth(majors[1]) * fitted.stage_bytes(majors[1]) + max(64 - fitted.rows, 0) * 128
        assert fitted.shared(majors[1]) >= read + 1024
        assert fitted.depth(majors[1]) >= 3
        assert fitted.fitted(*majors) == fitted
        assert fitted.inner % 64 == 0
        assert fitted.rows >= 64 or majors[0] == K_MAJOR


def test_schedules_of_few_rows_are_swapped():
    for majors, (m, n, k) in product(MAJORS, SHAPES):
        cut = schedule_for(m, n, k, majors, 132)
        assert cut.swapped == (m <= FEW)
        assert not cut.swapped or cut.columns >= m
        assert (
            not cut.swapped or majors not in ((K_MAJOR, K_MAJOR), (K_MAJOR, MN_MAJOR)) or cut.columns <= max(8, 2 * m)
        )
        left, right = majors[::-1] if cut.swapped else majors
        assert cut.fitted(left, right) == cut
        # What is chosen for aligned operands is compiled ahead.
        assert cut in TABLE or majors not in ALIGNED


def test_expected_time():
    one = Candidate(Schedule(128, 128, 128), start=1.0, tile=2.0, stage=0.5, alone=0.25, continued=4.0)
    times = [one.time(128 * tiles, 128, 300, 2) for tiles in (1, 2, 3)]
    assert times == [1.0 + 2.0 + 1.5, 1.0 + 2.0 + 1.5, 1.0 + 2 * 3.5]
    assert one.time(128, 128, 300, 2, True) == times[0] + 4.0


def test_expected_time_of_a_partial_last_round():
    for schedule, m, n in ((Schedule(64, 128), 64, 128), (Schedule(16, 8, 64, swapped=True), 8, 16)):
        few = Candidate(schedule, start=1.0, tile=0.0, stage=1.0, alone=0.25, continued=0.0)
        # Half of the multiprocessors share the memory, so each has twice as much of it.
        times = [few.time(m, n * tiles, 64, 4) for tiles in (1, 2, 4, 5, 7)]
        assert times == [1.25, 1.5, 2.0, 2.25, 2.75]


def test_segmented_schedules_fit_into_registers_and_shared_memory():
    for cut in SEGMENTED:
        in_registers = cut.segments.bit_length() - 1 - cut.near - cut.far
        assert min(in_registers, cut.near + cut.far) >= 0
        # With more, the compiler spills.
        assert (in_registers + 1) * cut.columns // 2 <= 192
        assert cut.far <= 1
        assert not cut.turns
        for majors in ALIGNED:
            fitted = cut.fitted(*majors)
            assert fitted.shared(majors[1]) <= SHARED
            sums = fitted.near * fitted.consumers * 64 * fitted.columns * 4
            stages = fitted.depth(majors[1]) * fitted.stage_bytes(majors[1])
            assert fitted.shared(majors[1]) >= stages + sums + 1024


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_segmented_schedules_are_valid(segments):
    for majors, (m, n, k), processors in product(ALIGNED, SHAPES, (16, 132)):
        cut = schedule_of_segments(m, n, k, majors, processors, segments, segment_length(k, segments))
        left, right = majors[::-1] if cut.swapped else majors
        assert cut.segments * cut.cluster == segments
        assert cut.swapped == (m <= FEW)
        assert not cut.swapped or cut.columns >= m
        assert cut.fitted(left, right) == cut
        assert cut.depth(right) >= 3
        assert processors > 16 or cut.cluster == 1


def test_rare_segmented_schedules():
    (*first, k), (*second, longer) = RARE
    layouts = [(K_MAJOR, right) for right in (K_MAJOR, MN_MAJOR)]
    assert any(schedule_of_segments(*first, k, pair, 132, 8, segment_length(k, 8)).far for pair in layouts)
    cuts = [(schedule_of_segments(*second, longer, pair, 132, 4, segment_length(longer, 4)), pair) for pair in layouts]
    assert any(cut.depth(pair[1]) == 3 for cut, pair in cuts)


def test_swapped_segmented_schedule_with_few_columns_fits():
    # The padded operand of a swapped tile would be the weight, which is then the left one.
    cut = next(one.schedule for one in in_segments(2) if one.schedule.swapped and one.schedule.columns < 64)
    assert fits(cut, (MN_MAJOR, K_MAJOR))


def test_few_tiles_use_a_cluster():
    for m, n, k in ((128, 1280, 8192), (1024, 1280, 8192)):
        assert schedule_of_segments(m, n, k, (K_MAJOR, K_MAJOR), 132, 8, k // 8).cluster > 1
    # Loads bound the time of a product of few rows, and many rows fill the processors anyway.
    for m, n, k in ((1, 8192, 28672), (4096, 4096, 14336)):
        assert schedule_of_segments(m, n, k, (K_MAJOR, K_MAJOR), 132, 8, k // 8).cluster == 1


def test_schedules_of_128_rows_fill_the_processors():
    # Seen beside cuBLAS: tiles of 64 x 192 in turns, on 22 processors, took 1.3 to 1.5 times as long.
    assert schedule_for(128, 4096, 4096, (K_MAJOR, MN_MAJOR), 132) == Schedule(64, 64, 128)
    assert schedule_for(128, 8192, 8192, (K_MAJOR, MN_MAJOR), 132) == Schedule(64, 128)
    assert schedule_for(4096, 4096, 4096, (K_MAJOR, MN_MAJOR), 132) == Schedule(128, 256)
