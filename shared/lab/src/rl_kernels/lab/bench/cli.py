"""``rl-kernels bench``: arguments and exit status.

0: every result that was timed was right. 1: a result of ours was wrong, and gets no time. 2: bad arguments, or nothing
can run here, reported before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rl_kernels.core.command import Parser, count, install_hint, writable
from rl_kernels.core.contract import DTYPES, contract
from rl_kernels.core.dispatch import AUTO
from rl_kernels.core.operator import Operator, arch_of
from rl_kernels.core.registry import UnknownOperator, kernel_registry
from rl_kernels.lab.bench.definition import GOALS, SMALL, Benchmark, Peer, Shape, bench_of
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import Effort, ceilings
from rl_kernels.lab.bench.options import Benches, add_options, check_options, chosen_options
from rl_kernels.lab.bench.plot import draw
from rl_kernels.lab.bench.record import OURS, Document, Record
from rl_kernels.lab.bench.report import FORMATS
from rl_kernels.lab.bench.runner import Job, run
from rl_kernels.lab.check.cell import Setting, call_of

USAGE = 2
ALL = "all"
"""Value of ``--compare`` for every peer, except where a shape excludes it."""


def parser(benches: Benches) -> Parser:
    """Return the parser; it has a flag for each numeric option of the operators."""
    command = Parser("rl-kernels bench", "Verify results, then time them and their peers in the same run.")
    command.add_argument("--op", action="append", metavar="NAME", help="operator (default: every installed one)")
    command.add_argument(
        "--shapes", metavar="LIST", help="sizes in the operator's order, such as 4096x2048x131072,8x64x99"
    )
    command.add_argument("--set", metavar="NAME", help=f"a set of shapes ({GOALS} on a GPU, {SMALL} on a CPU)")
    compared = "peers such as eager,compile; backends of the operator; all; or none (default: all)"
    command.add_argument("--compare", metavar="LIST", help=compared)
    command.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--backend", default=AUTO, metavar="NAME", help="backend of the operator (default: auto)")
    command.add_argument("--iters", type=count(1, 31), metavar="N", help="timed samples per pass (default: by time)")
    command.add_argument(
        "--warmup", type=count(0, 31), default=3, metavar="N", help="warm-up rounds; a GPU adds 0.1 s (default: 3)"
    )
    command.add_argument("--launches", action="store_true", help="also count launches and host waits of each GPU call")
    command.add_argument("--format", choices=FORMATS, default="text", help="format of the tables (default: text)")
    command.add_argument("--json", type=writable, metavar="FILE", help="also write every record as JSON")
    command.add_argument(
        "--plot", type=_plot_path, metavar="FILE", help="also plot shares of the floor (needs matplotlib)"
    )
    add_options(command, benches)
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return the exit status."""
    try:
        benches = _benches(argv)
        args, unknown = parser(benches).parse_known_args(argv)
        options = chosen_options(args, unknown, benches)
        jobs, left_out, document = _plan(args, benches, options)
    except (UnknownOperator, ValueError) as error:
        print(f"rl-kernels bench: {error}", file=sys.stderr)
        return USAGE
    document.records += left_out
    # The output of a peer must not mix with the tables.
    with redirect_stdout(sys.stderr), _progress(len(jobs)) as advance:
        for job in jobs:
            if job.dtype not in document.ceilings:
                document.ceilings[job.dtype] = ceilings(job.device, job.dtype)
            document.records += run(job, document.ceilings[job.dtype])
            advance(f"{job.operator.name} {job.shape.label} {job.dtype}")
            if args.json:
                document.write(args.json)
    if args.plot:
        draw(document.records, args.plot, document.environment)
    FORMATS[args.format](document)
    return 1 if document.wrong else 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show progress on a terminal, and nowhere else."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("ceilings", total=total)
        yield lambda label: bar.update(task, advance=1, description=label)


def _plot_path(text: str) -> Path:
    path = writable(text)
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install matplotlib")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, .svg or .pdf, got {text!r}")
    return path


def _benches(argv: Sequence[str] | None) -> Benches:
    """Return the operators that the arguments name: their benchmarks define more flags."""
    first = Parser("rl-kernels bench", add_help=False)
    first.add_argument("--op", action="append")
    names = first.parse_known_args(argv)[0].op or kernel_registry.names()
    return {operator.name: (operator, bench_of(operator)) for operator in map(kernel_registry.load, names)}


def _plan(
    args: argparse.Namespace, benches: Benches, options: Mapping[str, float]
) -> tuple[list[Job], list[Record], Document]:
    """Return the jobs to run, the records of operators that cannot run here, and the document to fill."""
    if not benches:
        raise ValueError(f"no operator is installed; for example, {install_hint('rl-kernels-fused-logp')}")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: this PyTorch sees no GPU")
    arch = arch_of(device.type, device.index)
    if arch not in contract().archs:
        raise ValueError(f"--device: {arch} is not in the tolerance contract, so no result could be verified")
    if args.shapes and (args.set or len(benches) > 1):
        raise ValueError("--shapes: give one operator with --op, and no --set")
    peer_names = _peer_names(args.compare or ALL, list(benches.values()))
    jobs, reasons = [], {}
    for operator, bench in benches.values():
        mine, reasons[operator.name] = _jobs(operator, bench, args, device, peer_names, options)
        jobs += mine
    if not jobs:
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    left_out = [Record(name, "", (), "", "", OURS, skipped={"": reason}) for name, reason in reasons.items() if reason]
    _set_environment(jobs)
    packages = {peer.package for job in jobs for peer in job.peers.values()} - {""}
    return jobs, left_out, Document(environment(device, sorted(packages)))


def _jobs(
    operator: Operator,
    bench: Benchmark,
    args: argparse.Namespace,
    device: torch.device,
    peer_names: list[str],
    options: Mapping[str, float],
) -> tuple[list[Job], str]:
    """Return the jobs of one operator, and the reason if there are none."""
    default = bench.dtype or ("bf16" if device.type == "cuda" else "fp32")
    chosen = args.set or (GOALS if device.type == "cuda" else SMALL)
    if not args.shapes and chosen not in bench.sets:
        return [], f"--set: expected one of {', '.join(bench.sets)}, got {chosen!r}"
    shapes = _shapes(args.shapes, bench) if args.shapes else bench.sets[chosen]
    shapes = [bench.with_options(shape, options) for shape in shapes]
    if options:
        check_options(operator, bench, shapes)
    jobs = []
    for dtype in dict.fromkeys(args.dtype or [default]):
        reason = _unavailable_reason(operator, args.backend, Setting(dtype, device, arch_of(device.type, device.index)))
        if reason:
            return [], reason
        for shape in shapes:
            peers = {
                name: peer
                for name, peer in bench.peers.items()
                if name in peer_names
                or (ALL in peer_names and name not in shape.without and dtype in (peer.dtypes or (dtype,)))
            }
            own = [backend.name for backend in operator.backends if backend.name in peer_names]
            peers |= {name: Peer(None, note=f"rl-kernels, backend {name}", backend=name) for name in own}
            effort = Effort(args.iters, args.warmup, args.launches)
            jobs.append(Job(operator, bench, shape, dtype, device, args.backend, peers, effort, options))
    return jobs, ""


def _unavailable_reason(operator: Operator, backend: str, setting: Setting) -> str:
    if backend == AUTO:
        return ""
    try:
        chosen = operator.backend(backend)
    except ValueError as error:
        return f"--{error}"
    reason = chosen.why_not(call_of(operator, setting))
    return f"--backend {backend}: {reason}" if reason else ""


def _peer_names(text: str, benches: Sequence[tuple[Operator, Benchmark]]) -> list[str]:
    if text == "none":
        return []
    names = [
        name for operator, bench in benches for name in (*bench.peers, *(backend.name for backend in operator.backends))
    ]
    known = [ALL, *dict.fromkeys(names)]
    requested = [name.strip() for name in text.split(",")]
    for name in requested:
        if name not in known:
            raise ValueError(f"--compare: expected names among {', '.join(known)}, or none, got {name!r}")
    return requested


def _shapes(text: str, bench: Benchmark) -> list[Shape]:
    order, shapes = "x".join(bench.shape), []
    for word in text.split(","):
        parts = word.strip().split("x")
        if len(parts) != len(bench.shape) or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"--shapes: expected {order}, sizes >= 1, got {word!r}")
        shapes.append(Shape(tuple(map(int, parts))))
    return shapes


def _set_environment(jobs: Sequence[Job]) -> None:
    """Set variables that a library reads once, before the first product of the process."""
    for job in jobs:
        for peer in job.peers.values():
            for variable, value in peer.environment.items():
                os.environ.setdefault(variable, value)
