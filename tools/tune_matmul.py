"""Measure the speed of each schedule of core's matrix product on this GPU, and write the table that one is chosen by.

``python tools/tune_matmul.py FILE`` writes ``tuned/h200.json`` anew. Each schedule runs on full waves of tiles, at two
lengths of K: the difference gives the time of a step, the rest the time that a wave takes beside its steps; and on an
eighth of the multiprocessors, where a step takes what its loads do. Weights never lie in the cache. Nothing here can
change a bit of a result: every schedule forms the same chain.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import fields
from pathlib import Path

import torch
import triton

from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib.schedule import Schedule, processors

LARGE = (
    Schedule(128, 256, 64, 8, 4, persistent=True, parts=2),
    Schedule(128, 128, 64, 8, 6),
    Schedule(128, 64, 64, 4, 4),
    Schedule(64, 128, 64, 4, 4),
    Schedule(64, 256, 64, 4, 4),
    Schedule(64, 64, 128, 4, 3),
    Schedule(64, 64, 128, 4, 6),
    Schedule(64, 128, 64, 4, 8),
    Schedule(64, 128, 128, 4, 4),
    Schedule(128, 64, 64, 4, 8),
)
FEW = tuple(
    Schedule(64, tokens, inner, 4, stages, group=1, swapped=True)
    for tokens in (16, 32, 64)
    for inner, stages in ((256, 5 if tokens == 16 else 4), (128, 9 if tokens == 16 else 6), (128, 4), (128, 3))
    if (64 + tokens) * inner * 2 * stages < 227 << 10
)
CACHE = 128 << 20
"""Bytes of weights that are read before the first are read again."""
SHARED = 227 << 10
"""Bytes of shared memory of a multiprocessor."""
LEAST = 3.0
"""Microseconds beside its steps that a wave takes at least; where two are at work at once the difference says less."""
LENGTHS = (2048, 8192)
REPEATS = 9
WAVES = 2


def resident(schedule: Schedule) -> int:
    """Return how many programs fit on a multiprocessor: by shared memory, and by 64 Ki registers."""
    if schedule.persistent:
        return 1
    loads = (schedule.rows + schedule.columns) * schedule.inner * 2 * schedule.stages + 1024
    registers = schedule.rows * schedule.columns + 64 * 32 * schedule.warps
    return max(1, min(SHARED // loads, 65536 // registers))


def heat() -> None:
    """Keep the GPU busy until its clocks are those of long work."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        torch.mm(a, a)


def microseconds(schedule: Schedule, k: int, tiles: int) -> float:
    """Return the median time of a product of so many tiles."""
    if schedule.swapped:
        m, n = schedule.columns, schedule.rows * tiles
    else:
        across = next(number for number in range(int(tiles**0.5), 0, -1) if tiles % number == 0)
        m, n = schedule.rows * across, schedule.columns * (tiles // across)
    copies = max(2, CACHE // (n * k * 2))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            gemm.matmul(a, weight.t(), out, schedule=schedule)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    heat()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / copies)
    return statistics.median(times)


def entry(schedule: Schedule) -> dict[str, object]:
    """Return the line of the table for one schedule."""
    units, counts = processors(torch.device("cuda", 0)), [length / schedule.inner for length in LENGTHS]
    steps, start = [], 0.0
    for programs in range(1, resident(schedule) + 1):
        short, long = (microseconds(schedule, k, units * programs * WAVES) / WAVES for k in LENGTHS)
        steps.append(round((long - short) / (counts[1] - counts[0]), 4))
        start = max(short - steps[-1] * counts[0], LEAST)
    alone = round((microseconds(schedule, LENGTHS[1], units // 8) - start) / counts[1], 4)
    default = Schedule(0, 0, 0, 0, 0)
    named = {
        field.name: value
        for field in fields(schedule)
        if (value := getattr(schedule, field.name)) != getattr(default, field.name)
    }
    return {"schedule": named, "start": round(start, 2), "alone": alone, "steps": steps}


def main() -> None:
    """Measure all, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    entries = []
    for schedule in (*LARGE, *FEW):
        found = entry(schedule)
        entries.append(found)
        print(found, flush=True)
    lines = ",\n".join(f"    {json.dumps(found)}" for found in entries)
    head = f'  "device": "{torch.cuda.get_device_name()}",\n  "triton": "{triton.__version__}",\n'
    given.file.write_text(f'{{\n{head}  "matmul": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
