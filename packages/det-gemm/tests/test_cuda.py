"""The host side of the CUDA C++ backend: what is compiled, which schedule is chosen."""

import pytest
import torch

from rl_kernels.core.cuda import where
from rl_kernels.core.cuda.gemm.matmul import plan_of
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

HALVES = (torch.bfloat16, torch.float16)
TABLE = [candidate.schedule for candidate in candidates()]
MAJORS = [(left, right) for left in (K_MAJOR, MN_MAJOR, PLAIN) for right in (K_MAJOR, MN_MAJOR, PLAIN)]
SHAPES = [(m, n, k) for m in (1, 8, 33, 64, 65, 1000, 8192) for n in (1, 64, 1280, 57344) for k in (0, 16, 4104, 8192)]
RARE = ((256, 28472, 13856), (8192, 1088, 5496))
"""With 8 segments sums of one wait in global memory; with 4 the other has three stages, the fewest."""
SHARED = 227 << 10


def test_programs_of_a_target():
    backend = OPERATOR.backend("cuda-sm90").load()
    programs = backend.programs("sm_90a")
    assert len(set(programs)) == len(programs) > 2 * 4 * sum(not one.schedule.swapped for one in candidates())
    assert {program.arch for program in programs} == {"sm_90a"}
    assert not any(backend.programs(arch) for arch in ("sm_80", "sm_90", "sm_100a"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_what_the_passes_of_a_layer_launch_is_compiled_ahead(dtype, segments):
    programs = set(OPERATOR.backend("cuda-sm90").load().programs("sm_90a"))

    def compiled(m, n, k, right, out=dtype, left="rows", continues=False):
        strides = {"rows": (k, 1), "columns": (1, m)}[left], {"rows": (n, 1), "columns": (1, k)}[right]
        operands = (m, k), strides[0], True, (k, n), strides[1], True, (n, 1), True
        how = continues, None, 132, segments, segment_length(k, segments)
        return plan_of(*operands, dtype, out, *how).program in programs

    for m, n, k in ((m, n, k) for m, n, k in (*SHAPES, *RARE) if k and n % 8 == 0 and k % 8 == 0):
        # Forward, and the gradient of the input; in segments, FP32 partials go to other ranks.
        assert all(compiled(m, n, k, right) for right in ("rows", "columns"))
        assert compiled(m, n, k, "rows", torch.float32)
        if segments > 1:
            assert compiled(m, n, k, "columns", torch.float32)
        elif m > FEW and m % 8 == 0:
            # The gradient of the weight, and main_grad.
            assert all(compiled(m, n, k, "rows", torch.float32, "columns", more) for more in (False, True))


def test_cubins_are_looked_for_where_the_programs_are(monkeypatch):
    asked = []
    monkeypatch.setattr(where, "missing", lambda packages, *_: asked.append(packages))
    backend = OPERATOR.backend("cuda-sm90")
    backend.why_not(Call(torch.device("cuda", 0), torch.bfloat16, "sm90", {"K": 64, "N": 64}))
    assert set(asked[0]) == {program.package for program in backend.load().programs("sm_90a")}


@pytest.mark.parametrize(
    ("dtype", "traits", "reason"),
    [
        (torch.float32, {"K": 64, "N": 64}, "FP32"),
        (torch.bfloat16, {"K": 63, "N": 64}, "K = 63"),
        (torch.float16, {"K": 64, "N": 65}, "N = 65"),
        (torch.float16, {"K": 64, "N": 72}, None),
    ],
)
def test_what_is_left_to_triton(monkeypatch, dtype, traits, reason):
    monkeypatch.setattr(where, "missing", lambda *_: None)
    found = OPERATOR.backend("cuda-sm90").limits(Call(torch.device("cuda", 0), dtype, "sm90", traits))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("cut", TABLE, ids=str)
def test_schedules_fit_on_a_multiprocessor_however_operands_lie(cut, majors):
    fitted = cut.fitted(*majors)
    assert fitted.shared(majors[1]) <= SHARED - 2048 + 1024
    # The instruction reads 64 rows of 128 bytes of every tile, those of the last stage too.
    read = fitted.depth(majors[1]) * fitted.stage_bytes(majors[1]) + max(64 - fitted.rows, 0) * 128
    assert fitted.shared(majors[1]) >= read + 1024
    assert fitted.depth(majors[1]) >= 3
    assert fitted.fitted(*majors) == fitted
    assert fitted.inner % 64 == 0
    assert fitted.rows >= 64 or majors[0] == K_MAJOR


@pytest.mark.parametrize("majors", MAJORS)
def test_few_rows_are_read_at_once_and_schedules_are_possible(majors):
    for m, n, k in SHAPES:
        cut = schedule_for(m, n, k, majors, 132)
        assert cut.swapped == (m <= FEW)
        assert not cut.swapped or cut.columns >= m
        left, right = majors[::-1] if cut.swapped else majors
        assert cut.fitted(left, right) == cut


@pytest.mark.parametrize("majors", [pair for pair in MAJORS if PLAIN not in pair])
def test_what_is_chosen_for_aligned_operands_is_compiled_ahead(majors):
    for m, n, k in SHAPES:
        assert schedule_for(m, n, k, majors, 132) in TABLE


@pytest.mark.parametrize("right", [K_MAJOR, MN_MAJOR])
def test_few_rows_take_no_more_columns_than_they_need(right):
    for m, n, k in SHAPES:
        cut = schedule_for(m, n, k, (K_MAJOR, right), 132)
        assert not cut.swapped or cut.columns <= max(8, 2 * m)


def test_expected_time_counts_rounds_stages_and_what_is_continued():
    one = Candidate(Schedule(128, 128, 128), start=1.0, tile=2.0, stage=0.5, alone=0.25, continued=4.0)
    times = [one.time(128 * tiles, 128, 300, 2) for tiles in (1, 2, 3)]
    assert times == [1.0 + 2.0 + 1.5, 1.0 + 2.0 + 1.5, 1.0 + 2 * 3.5]
    assert one.time(128, 128, 300, 2, True) == times[0] + 4.0


SEGMENTED = [candidate.schedule for count in (2, 4, 8) for candidate in in_segments(count)]


@pytest.mark.parametrize("cut", SEGMENTED, ids=str)
def test_schedules_with_segments_have_room_for_their_sums(cut):
    waits = cut.segments.bit_length() - 1
    in_registers = waits - cut.near - cut.far
    assert 0 <= cut.near + cut.far <= waits
    # With more, the compiler spills.
    assert (in_registers + 1) * cut.columns // 2 <= 192
    assert cut.far <= 1
    assert not cut.turns
    for majors in [pair for pair in MAJORS if PLAIN not in pair]:
        fitted = cut.fitted(*majors)
        assert fitted.shared(majors[1]) <= SHARED - 2048 + 1024
        sums = fitted.near * fitted.consumers * 64 * fitted.columns * 4
        assert fitted.shared(majors[1]) >= fitted.depth(majors[1]) * fitted.stage_bytes(majors[1]) + sums + 1024


@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize("majors", [pair for pair in MAJORS if PLAIN not in pair])
def test_a_schedule_for_segments_has_as_many_and_is_deep_enough(majors, segments):
    for m, n, k in SHAPES:
        for processors in (16, 132):
            cut = schedule_of_segments(m, n, k, majors, processors, segments, segment_length(k, segments))
            left, right = majors[::-1] if cut.swapped else majors
            assert cut.segments * cut.cluster == segments
            assert cut.swapped == (m <= FEW)
            assert not cut.swapped or cut.columns >= m
            assert cut.fitted(left, right) == cut
            assert cut.depth(right) >= 3
            assert processors > 16 or cut.cluster == 1


def test_a_schedule_for_segments_may_keep_sums_in_global_memory_or_have_three_stages():
    (*first, k), (*second, longer) = RARE
    layouts = [(K_MAJOR, right) for right in (K_MAJOR, MN_MAJOR)]
    assert any(schedule_of_segments(*first, k, pair, 132, 8, segment_length(k, 8)).far for pair in layouts)
    cuts = [(schedule_of_segments(*second, longer, pair, 132, 4, segment_length(longer, 4)), pair) for pair in layouts]
    assert any(cut.depth(pair[1]) == 3 for cut, pair in cuts)


def test_few_columns_of_a_tile_need_no_whole_box_where_operands_are_swapped():
    # The padded operand of a swapped tile would be the weight, which is then the left one.
    cut = next(one.schedule for one in in_segments(2) if one.schedule.swapped and one.schedule.columns < 64)
    assert fits(cut, (MN_MAJOR, K_MAJOR))


def test_segments_of_few_tiles_are_spread_over_a_cluster():
    for m, n, k in ((128, 1280, 8192), (1024, 1280, 8192)):
        assert schedule_of_segments(m, n, k, (K_MAJOR, K_MAJOR), 132, 8, k // 8).cluster > 1
    # Loads bound the time of a product of few rows, and many rows fill the processors anyway.
    for m, n, k in ((1, 8192, 28672), (4096, 4096, 14336)):
        assert schedule_of_segments(m, n, k, (K_MAJOR, K_MAJOR), 132, 8, k // 8).cluster == 1


def test_a_gradient_of_128_rows_takes_tiles_that_fill_the_processors():
    # Seen beside cuBLAS: tiles of 64 x 192 in turns, on 22 processors, took 1.3 to 1.5 times as long.
    assert schedule_for(128, 4096, 4096, (K_MAJOR, MN_MAJOR), 132) == Schedule(64, 64, 128)
    assert schedule_for(128, 8192, 8192, (K_MAJOR, MN_MAJOR), 132) == Schedule(64, 128)
    assert schedule_for(4096, 4096, 4096, (K_MAJOR, MN_MAJOR), 132) == Schedule(128, 256)


@pytest.mark.parametrize("schedule", [Schedule(64, 128), Schedule(16, 8, 64, swapped=True)])
def test_a_last_round_of_few_tiles_that_wait_for_their_operands_takes_less(schedule):
    few = Candidate(schedule, start=1.0, tile=0.0, stage=1.0, alone=0.25, continued=0.0)
    m, n = (8, 16) if schedule.swapped else (64, 128)

    def time(tiles):
        return few.time(m, n * tiles, 64, 4)

    # Half of the multiprocessors share the memory, so each has twice as much of it.
    assert [time(tiles) for tiles in (1, 2, 4, 5, 7)] == [1.25, 1.5, 2.0, 2.25, 2.75]
