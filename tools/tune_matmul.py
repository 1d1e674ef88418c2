"""Measure the speed of each schedule of a matrix product on this GPU, and write the table used to choose a schedule.

``python tools/tune_matmul.py FILE`` writes a new ``tuned/h200.json`` for core's Triton product or, with ``--cuda``,
for its CUDA product. Each schedule runs on full waves of tiles at two lengths of K: the difference gives the time
of a step, the rest is the time of a wave outside its steps. It also runs on an eighth of the multiprocessors, where the
loads determine the time of a step. Weights are never in the cache. Nothing here can change a bit of a result: every
schedule adds the same chain.

``--beside MxNxK,...`` writes no table: it prints the time of each schedule that fits as a share of cuBLAS's time, taken
in turn, for these products of a linear layer, forward and dA. Near the power limit, times measured alone drift: keep a
table if the schedules that it chooses are fast in this comparison. ``--json FILE`` writes these shares too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from rl_kernels.core.command import writable, write_json
from rl_kernels.core.cuda.gemm import matmul as cuda_matmul
from rl_kernels.core.cuda.gemm import schedule as cuda_schedule
from rl_kernels.core.cuda.gemm.schedule import Schedule as CudaSchedule
from rl_kernels.core.triton_lib import gemm
from rl_kernels.core.triton_lib import schedule as triton_schedule
from rl_kernels.core.triton_lib.schedule import Schedule, processors
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import GRAPH, Effort, clock_of, device_seconds

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
CUDA = (
    *(CudaSchedule(128, columns) for columns in (256, 192, 160, 128)),
    *(CudaSchedule(64, columns, turns=True) for columns in (256, 192)),
    CudaSchedule(64, 128),
    CudaSchedule(64, 64, inner=128),
    *(
        CudaSchedule(rows, columns, inner, group=1, swapped=True)
        for columns, cuts in (
            (8, ((64, 256), (48, 256), (32, 256), (32, 512))),
            (16, ((64, 256), (48, 256), (32, 256))),
            (32, ((64, 256), (48, 256), (32, 256), (16, 256))),
            (64, ((64, 128), (16, 256))),
        )
        for rows, inner in cuts
    ),
)
CACHE = 128 << 20
"""Smallest number of bytes of weights to cycle through, so that they are not in the cache."""
SHARED = 227 << 10
"""Bytes of shared memory of a multiprocessor."""
LEAST = 3.0
"""Lower bound, in microseconds, of a wave outside its steps: the measured difference is too small if waves overlap."""
PACKAGES = ("rl-kernels-core",)
CHOSEN = "chosen"
"""Label of the schedule that the table chooses, which is timed too."""
LENGTHS = (2048, 8192)
REPEATS = 9
WAVES = 2
CUDA_WAVES = 4
"""Waves of tiles for the persistent kernel; twice as many give the time of a tile outside its steps."""


def resident(schedule: Schedule) -> int:
    """Return the number of programs that fit on a multiprocessor: by shared memory, and by 64 Ki registers."""
    if schedule.persistent:
        return 1
    loads = (schedule.rows + schedule.columns) * schedule.inner * 2 * schedule.stages + 1024
    registers = schedule.rows * schedule.columns + 64 * 32 * schedule.warps
    return max(1, min(SHARED // loads, 65536 // registers))


def heat() -> None:
    """Keep the GPU busy until its clock rate has settled."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        torch.mm(a, a)


def multiply(product: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    """Write ``a @ b`` to ``out`` by a class ``Product``."""
    product(a, b, out, **options)(a, b, out)


def microseconds(product: Callable[..., Any], schedule: Any, k: int, tiles: int, continues: bool = False) -> float:
    """Return the median time of a product of ``tiles`` tiles."""
    if schedule.swapped:
        m, n = schedule.columns, schedule.rows * tiles
    else:
        across = next(number for number in range(int(tiles**0.5), 0, -1) if tiles % number == 0)
        m, n = schedule.rows * across, schedule.columns * (tiles // across)
    copies = max(2, CACHE // (n * k * 2))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(m, n, device="cuda", dtype=torch.float32 if continues else torch.bfloat16)

    def run() -> None:
        for weight in weights:
            multiply(product, a, weight.t(), out, schedule=schedule, continues=continues)

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


def named(schedule: Any) -> dict[str, object]:
    """Return the fields of a schedule that are not at their defaults."""
    values = ((field, getattr(schedule, field.name)) for field in fields(schedule))
    return {field.name: value for field, value in values if field.default is MISSING or value != field.default}


def entry(schedule: Schedule) -> dict[str, object]:
    """Return the table entry of one schedule of the Triton product."""
    units, counts = processors(torch.device("cuda", 0)), [length / schedule.inner for length in LENGTHS]
    steps, start = [], 0.0
    for programs in range(1, resident(schedule) + 1):
        short, long = (microseconds(gemm.Product, schedule, k, units * programs * WAVES) / WAVES for k in LENGTHS)
        steps.append(round((long - short) / (counts[1] - counts[0]), 4))
        start = max(short - steps[-1] * counts[0], LEAST)
    alone = round((microseconds(gemm.Product, schedule, LENGTHS[1], units // 8) - start) / counts[1], 4)
    return {"schedule": named(schedule), "start": round(start, 2), "alone": alone, "steps": steps}


def cuda_entry(schedule: CudaSchedule) -> dict[str, object]:
    """Return the table entry of one schedule of the CUDA kernel."""

    def time(k: int, tiles: int, continues: bool = False) -> float:
        return microseconds(cuda_matmul.Product, schedule, k, tiles, continues)

    units, (few, many) = processors(torch.device("cuda", 0)), LENGTHS
    counts = [length / schedule.inner for length in LENGTHS]
    short, long, twice = (
        time(few, CUDA_WAVES * units),
        time(many, CUDA_WAVES * units),
        time(few, 2 * CUDA_WAVES * units),
    )
    stage = (long - short) / (counts[1] - counts[0]) / CUDA_WAVES
    tile = max((twice - short) / CUDA_WAVES - counts[0] * stage, 0.0)
    start = max(short - CUDA_WAVES * (tile + counts[0] * stage), 1.0)
    alone = (time(many, units // 8) - start - tile) / counts[1]
    continued = 0.0 if schedule.swapped else max(time(few, 2 * CUDA_WAVES * units, True) - twice, 0.0) / 2 / CUDA_WAVES
    speeds = {"start": start, "tile": tile, "stage": stage, "alone": alone, "continued": continued}
    return {"schedule": named(schedule), **{name: round(value, 4) for name, value in speeds.items()}}


def sizes(text: str) -> list[tuple[int, ...]]:
    """Parse M, N and K of products: an argument type."""
    products = [tuple(map(int, word.split("x"))) for word in text.split(",")]
    if any(len(product) != 3 or min(product) < 1 for product in products):
        raise ValueError(text)
    return products


def beside(m: int, n: int, k: int, columns: bool, cuda: bool) -> tuple[float, dict[str, float]]:
    """Return cuBLAS's time of a product in us, and each fitting schedule's time as a share of it, timed in turn.

    With ``columns`` the right operand is column-major, like a weight in the forward pass.
    """
    copies, few = max(2, CACHE // (n * k * 2)), (cuda_schedule if cuda else triton_schedule).FEW
    shape = (n, k) if columns else (k, n)
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    rights = [weight.t() if columns else weight for weight in weights]
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    product: Callable[..., Any] = cuda_matmul.Product if cuda else gemm.Product
    multiply(product, a, rights[0], out)
    expected = out.clone()
    clocks = {"cuBLAS": clock_of([partial(torch.mm, a, right, out=out) for right in rights])}
    clocks[CHOSEN] = clock_of([partial(multiply, product, a, right, out) for right in rights])
    weight = cuda_schedule.K_MAJOR if columns else cuda_schedule.MN_MAJOR
    for schedule in CUDA if cuda else (*LARGE, *FEW):
        if schedule.swapped != (m <= few) or (schedule.swapped and schedule.columns < m):
            continue
        majors = (weight, cuda_schedule.K_MAJOR) if schedule.swapped else (cuda_schedule.K_MAJOR, weight)
        if cuda and schedule.fitted(*majors) != schedule:
            continue
        clock = clock_of([partial(multiply, product, a, right, out, schedule=schedule) for right in rights])
        multiply(product, a, rights[0], out, schedule=schedule)
        if not torch.equal(out, expected):
            raise RuntimeError(f"{schedule}: bits differ from the chosen schedule")
        clocks[" ".join(f"{name} {value}" for name, value in named(schedule).items())] = clock
    plain = [name for name, clock in clocks.items() if clock.how != GRAPH]
    if plain:
        raise RuntimeError(
            f"{', '.join(plain)}: no CUDA graph could be captured, and plain calls cannot be compared with graphs"
        )
    times = dict(zip(clocks, device_seconds(list(clocks.values()), Effort(iters=REPEATS, warmup=1)), strict=True))
    base = times.pop("cuBLAS")
    return base * 1e6, {name: time / base for name, time in sorted(times.items(), key=lambda item: item[1])}


def compare(products: Sequence[tuple[int, int, int]], cuda: bool, file: Path | None) -> None:
    """Print the speeds of the schedules of these products, and write them to a file if one is given."""
    document: dict[str, Any] = {"version": 1, "environment": environment(torch.device("cuda"), PACKAGES)}
    document |= {"kernel": "cuda" if cuda else "triton", "products": []}
    for (m, n, k), (name, columns) in itertools.product(products, (("forward", True), ("dA", False))):
        us, shares = beside(m, *((n, k) if columns else (k, n)), columns, cuda)
        listed = ", ".join(f"{share:.3f} {schedule}" for schedule, share in shares.items())
        print(f"{name} {m}x{n}x{k}: cuBLAS {us:.1f} us; {listed}", flush=True)
        document["products"].append({"pass": name, "sizes": [m, n, k], "cuBLAS, us": us, "shares": shares})
        if file is not None:
            write_json(file, document)


def main() -> None:
    """Measure all schedules, print the table and write it; or print times relative to cuBLAS."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="the table to write")
    parser.add_argument("--beside", type=sizes, default=[], metavar="MxNxK,...", help="print times relative to cuBLAS")
    parser.add_argument("--json", type=writable, metavar="FILE", help="with --beside: also write the shares")
    parser.add_argument("--cuda", action="store_true", help="tune core's CUDA product, not its Triton one")
    args = parser.parse_args()
    if bool(args.beside) == bool(args.file):
        parser.error("give FILE, or --beside with products to time")
    if args.json is not None and not args.beside:
        parser.error("--json: expected only with --beside")
    if args.beside:
        compare(args.beside, args.cuda, args.json)
        return
    entries = []
    measured = map(cuda_entry, CUDA) if args.cuda else map(entry, (*LARGE, *FEW))
    for table_entry in measured:
        entries.append(table_entry)
        print(table_entry, flush=True)
    device = {"device": torch.cuda.get_device_name()}
    body = {"cuda": entries} if args.cuda else {"triton": triton.__version__, "matmul": entries}
    write_json(args.file, device | body)


if __name__ == "__main__":
    main()
