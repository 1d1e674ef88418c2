"""The program of every ``benchmarks/bench.py``: verify, time, print a table; no speed for a wrong result."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.benchmark import Timer

from rl_kernels.core.check.candidate import backend_candidate, named
from rl_kernels.core.check.cell import Cell, Setting
from rl_kernels.core.check.relations import RELATIONS
from rl_kernels.core.check.result import Check
from rl_kernels.core.command import Parser, count
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.operator import Operator, arch_of
from rl_kernels.core.testing import Case, Inputs, Spec, spec_of

Baselines = Mapping[str, Callable[..., Any]]
"""By name, plain implementations that take the case's keyword arguments."""


def main(operator: Operator, cases: Sequence[Case], baselines: Baselines, argv: Sequence[str] | None = None) -> int:
    """Benchmark an operator on its cases beside its baselines; return the exit status: 1 if a result is wrong."""
    parser = Parser(f"bench {operator.name}", f"Time {operator.name} beside {', '.join(baselines)}.")
    parser.add_argument("--iters", type=count(1), default=10, help="timed runs; their median is reported")
    parser.add_argument("--warmup", type=count(0), default=2, help="runs before that")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--backend", default="auto", choices=["auto", *(b.name for b in operator.backends)])
    given = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(given.dtype, device, arch_of(device.type, device.index))
    candidate = backend_candidate(operator, given.backend, given.backend, device.type)
    console = Console()
    title = f"{operator.name}, {given.dtype}, {device}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    table = Table("shape", "implementation", "forward ms", "forward + backward ms", "speed over it", title=title)
    wrong: list[str] = []
    for case in track(cases, "timing", transient=True, disable=not console.is_terminal):
        cell = Cell(candidate, spec_of(operator), case, setting)
        found = _verify(cell)
        wrong += found
        if not found:
            _rows(table, cell, baselines, given.warmup, given.iters)
    console.print(table)
    for message in wrong:
        console.print(f"WRONG, not timed: {message}")
    return 1 if wrong else 0


def _verify(cell: Cell) -> list[str]:
    records = [record for relation in ("accuracy", "gradients") for record in RELATIONS[relation](cell)]
    failed = [record for record in records if isinstance(record, Check) and not record.passed]
    return [f"{check.case}: {check.item}: {check.comparison.message}" for check in failed]


def _rows(table: Table, cell: Cell, baselines: Baselines, warmup: int, iters: int) -> None:
    shape = "x".join(map(str, cell.case.sizes.values()))
    own = _times(lambda **inputs: cell.candidate.call(cell.case.function, inputs), cell, warmup, iters)
    table.add_row(shape, f"{cell.candidate.operator.name} ({cell.candidate.name})", *_milliseconds(own), "")
    for name, baseline in baselines.items():
        other = _times(baseline, cell, warmup, iters)
        ratios = " / ".join(f"{theirs / ours:.2f}" for theirs, ours in zip(other, own, strict=True))
        table.add_row(shape, name, *_milliseconds(other), ratios)


def _milliseconds(times: Sequence[float]) -> list[str]:
    return [f"{time * 1e3:.3f}" for time in times]


def _times(function: Callable[..., Any], cell: Cell, warmup: int, iters: int) -> list[float]:
    """Return the median seconds of the forward alone, and with the backward where there is one."""
    spec, inputs = cell.spec, copy.deepcopy(cell.inputs)
    leaves = [inputs[name].requires_grad_() for name in spec.differentiable if name in inputs]

    def forward() -> None:
        with torch.no_grad():
            function(**inputs)

    upstream = _upstream(function, spec, inputs)

    def both() -> None:
        outputs = named(function(**inputs), spec.output)
        torch.autograd.grad([outputs[name] for name in upstream], leaves, list(upstream.values()))

    return [_median(run, warmup, iters) for run in ([forward, both] if upstream and leaves else [forward])]


def _upstream(function: Callable[..., Any], spec: Spec, inputs: Inputs) -> dict[str, torch.Tensor]:
    outputs = named(function(**inputs), spec.output)
    return {name: torch.randn_like(value) for name, value in outputs.items() if value.requires_grad}


def _median(run: Callable[[], None], warmup: int, iters: int) -> float:
    for _ in range(warmup):
        run()
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(1).median for _ in range(iters))
