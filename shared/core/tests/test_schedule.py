"""Schedules of matrix products: the table, the time that it expects, and what it is not allowed to look at."""

from __future__ import annotations

import pytest
import torch

from rl_kernels.core.triton_lib import schedule
from rl_kernels.core.triton_lib.schedule import ANYWHERE, Candidate, Schedule, schedule_for
from rl_kernels.core.tuned import tuned

GPU = torch.device("cuda", 0)
SHARED = 227 << 10
SHAPES = [(m, n, k) for m in (1, 8, 33, 128, 1000, 8192) for n in (64, 1280, 4096, 57344) for k in (16, 4104, 8192)]
TABLE = [Schedule(**entry["schedule"]) for entry in tuned("rl_kernels.core.triton_lib")["matmul"]]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "sm90")


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(schedule, "INTERPRETED", False)
    monkeypatch.setattr("rl_kernels.core.operator.arch_of", lambda *_: arch)
    monkeypatch.setattr(schedule, "processors", lambda _: 132)


def test_schedules_of_the_table_are_measured_and_fit_on_a_multiprocessor() -> None:
    for cut in TABLE:
        loads = (cut.rows + cut.columns) * cut.inner * 2 * cut.stages
        stored = cut.rows * cut.columns // cut.parts * 2 if cut.persistent else 0
        assert loads + stored <= SHARED
        assert cut.inner % 16 == 0
        assert cut.rows % 64 == 0
        assert cut.parts in (1, 2)
    for entry in tuned("rl_kernels.core.triton_lib")["matmul"]:
        assert entry["start"] > 0
        assert entry["steps"] == sorted(entry["steps"])
        assert min(entry["alone"], *entry["steps"]) > 0


def test_tiles_of_a_swapped_schedule_lie_along_the_columns() -> None:
    assert Schedule(64, 16, 128, 4, 4).tiles(100, 1000) == 2 * 63
    assert Schedule(64, 16, 128, 4, 4, swapped=True).tiles(100, 1000) == 7 * 16


def test_expected_time_counts_waves() -> None:
    candidate = Candidate(Schedule(64, 64, 32, 4, 3), start=2.0, alone=0.75, steps=(1.0, 1.5))
    times = [candidate.time(64 * tiles, 64, 100, units=2) for tiles in (1, 2, 3, 4, 5, 9)]
    # Four steps of K; two multiprocessors with two programs each.
    assert times == [6.0, 6.0, 8.0, 8.0, 8.0 + 6.0, 8.0 + 8.0 + 6.0]


def test_few_programs_that_read_have_the_memory_to_themselves() -> None:
    candidate = Candidate(Schedule(64, 16, 32, 4, 3, swapped=True), start=2.0, alone=0.75, steps=(1.0, 2.0))
    times = [candidate.time(16, 64 * tiles, 100, units=2) for tiles in (1, 2, 3, 4)]
    assert times == [2 + 4 * 0.75, 2 + 4 * 1.0, 2 + 4 * 1.5, 2 + 4 * 2.0]


@pytest.mark.usefixtures("hopper")
def test_every_product_has_a_schedule_and_few_rows_stream_the_weight() -> None:
    for shape in SHAPES:
        found = [schedule_for(*shape, dtype, GPU) for dtype in (torch.bfloat16, torch.float16)]
        assert found[0] == found[1]
        assert found[0] in TABLE
    cuts = {m: schedule_for(m, 4096, 4096, torch.bfloat16, GPU) for m in (*range(1, 66), 4096)}
    assert all(cut.swapped == (m <= 64) for m, cut in cuts.items())
    assert all(cut.columns >= m for m, cut in cuts.items() if cut.swapped)
    assert schedule_for(8192, 12288, 4096, torch.bfloat16, GPU).persistent


@pytest.mark.parametrize("arch", ["sm80", "sm100", "gfx942"])
@pytest.mark.parametrize("dtype", [*ANYWHERE])
def test_another_architecture_has_one_schedule(monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype) -> None:
    pretend(monkeypatch, arch)
    assert {schedule_for(*shape, dtype, GPU) for shape in SHAPES} == {ANYWHERE[dtype]}


@pytest.mark.usefixtures("hopper")
def test_fp32_loads_one_step_and_takes_large_tiles_where_they_fill_the_chip() -> None:
    found = {shape: schedule_for(*shape, torch.float32, GPU) for shape in SHAPES}
    assert {(cut.inner, cut.swapped) for cut in found.values()} == {(16, False)}
    assert found[8192, 4096, 8192].rows == 128
    assert schedule_for(8192, 4096, 8192, torch.float32, GPU, spans=True) == ANYWHERE[torch.float32]
    assert found[1000, 64, 16].rows == 64
    assert found[33, 4096, 16].rows == 32
    assert found[1, 4096, 16].rows == 16
    assert all((32 + cut.rows + cut.columns) * 16 * 4 * cut.stages < SHARED for cut in found.values())
