"""Run compute-sanitizer over the kernels of every operator: `python tools/sanitize.py --json sanitize.json`.

The calls are the small cases of each operator, forward and backward. Each case runs twice: once unchanged, and once
changed in one way, in turn: every tensor strided, at an odd address, with a main_grad if there is a weight, or with
arbitrary integers that are not validated. Processes share the calls of an operator (`--parts`), for each tool; they
first run without a tool, which compiles the kernels. A kernel with a planted fault runs under each tool as well, and
must be reported. Needs a GPU, and the packages installed.

initcheck does not see what TMA writes: it reports a product that is stored by TMA as never
written. For such kernels (`--backend cuda-sm90` of det_gemm and linear_logp) give `--tool memcheck racecheck`; the
checker shows that they read nothing unwritten, because it poisons new memory.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from limited import TIMED_OUT, limited

from rl_kernels.core.command import Parser, count, write_json
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.core.operator import Operator
from rl_kernels.core.registry import kernel_registry
from rl_kernels.core.testing import Case, Draw, Inputs, Spec, Transform, Variant, function_of, spec_of
from rl_kernels.lab.check.guard import named
from rl_kernels.lab.check.transforms import STORAGE

ERRORS = r"ERROR SUMMARY: (\d+) error"
TOOLS = {"memcheck": ERRORS, "racecheck": r"RACECHECK SUMMARY: (\d+) hazard", "initcheck": ERRORS}
OPTIONS = {"memcheck": ("--padding", "512"), "racecheck": (), "initcheck": ()}
"""Padding, so that a write beyond one tensor is not a write into the next."""
LARGEST = 1 << 21
"""Elements of the largest call that is made."""
ANY = (-(1 << 40), -1, 1 << 31, 1 << 40)
"""Integers that are not valid indices; the sizes of the case are used too."""
PLANTED = "a planted fault"


@dataclass(frozen=True)
class Result:
    """The result of one tool on one part of an operator's calls, or on the kernel with a planted fault."""

    tool: str
    operator: str
    part: int
    passed: bool
    calls: int
    errors: int | None
    exit: int
    seconds: float
    output: list[str]

    def line(self) -> str:
        """Return the line to print."""
        verdict = "passed" if self.passed else "FAILED"
        counts = f"{self.calls} calls, {self.errors} errors, {self.seconds} s"
        return f"{verdict} {self.tool:<9} {self.operator:<16} part {self.part}, {counts}"


def calls(operator: Operator, dtype: str, device: str) -> Iterator[tuple[str, Case, Inputs]]:
    """Yield (label, case, arguments) of every call: each case unchanged, then changed in one way."""
    spec = spec_of(operator)
    for number, case in enumerate((*spec.cases, *spec.empty)):
        if case.gpu:
            continue
        draw = Draw(DTYPES[dtype], device, seed=7)
        inputs = spec.inputs(case, draw)
        if sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor)) > LARGEST:
            continue
        yield case.name, case, inputs
        changes: list[Transform] = list(STORAGE.values())
        if case.grad and any(name.endswith("weight") for name in inputs):
            changes.append(_with_main_grad)
        parameters = inspect.signature(operator.function(case.function)).parameters
        if "validate" in parameters:
            changes.append(partial(_unchecked, parameters))
        for variant in changes[number % len(changes)](case, spec.inputs(case, draw), draw):
            yield f"{case.name}, {variant.label}", case, variant.inputs


def _with_main_grad(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
    for name in inputs:
        if name.endswith("weight"):
            inputs[name].main_grad = torch.zeros_like(inputs[name], dtype=torch.float32)
    yield Variant("main_grad", inputs)


def _unchecked(parameters: Container[str], case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
    """Yield the call with invalid indices in every int64 tensor, without validation."""
    values = torch.tensor([*ANY, *case.sizes.values()], device=draw.device)
    if "cu_seqlens" in inputs and "max_seqlen" in parameters:
        # Without max_seqlen, the size of the allocated memory would come from the invalid integers.
        inputs["max_seqlen"] = int(inputs["cu_seqlens"].diff().max())
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
            places = torch.arange(value.numel(), device=draw.device) % len(values)
            inputs[name] = values[places].view(value.shape)
    yield Variant("any integers", {**inputs, "validate": False})


def make(operator: Operator, case: Case, inputs: Inputs, backend: str) -> None:
    """Make one call, and the backward pass of what it returns."""
    spec: Spec = spec_of(operator)
    if case.grad and not spec.writes.keys() & inputs.keys():
        for name in spec.differentiable:
            if name in inputs:
                inputs[name].requires_grad_()
    results = named(function_of(operator, case.function)(**inputs, backend=backend), spec.output).values()
    attached = [value for value in results if value.requires_grad]
    if attached:
        torch.autograd.backward(attached, [torch.ones_like(value) for value in attached])


def work(name: str, args: argparse.Namespace) -> int:
    """Make a part of an operator's calls, or run the planted kernel; print the number of calls."""
    call_count = 0
    if name == PLANTED:
        import sanitize_planted

        sanitize_planted.run(args.tool[0])
    else:
        operator = kernel_registry.load(name)
        for dtype in args.dtype:
            for label, case, inputs in islice(calls(operator, dtype, args.device), args.part, None, args.parts):
                try:
                    make(operator, case, inputs, args.backend)
                except BackendUnavailable:
                    # Another backend takes this call, for example FP64 operands.
                    continue
                except Exception as error:
                    raise RuntimeError(f"{name}, {dtype}, {label}") from error
                call_count += 1
    if args.device == "cuda":
        torch.cuda.synchronize()
    print(f"calls made: {call_count}")
    return 0


class Sanitizer:
    """Runs this program again as a worker, with or without a tool."""

    def __init__(self, program: str, args: argparse.Namespace) -> None:
        self._program = program
        self._args = args
        # Without caching each tensor is its own allocation, so that a tool sees accesses beyond it.
        self._environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def version(self) -> str:
        """Return the version of the sanitizer."""
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=False).stdout
        return next((line for line in said.splitlines() if "ersion" in line), said.strip())

    def prepare(self, operator: str, part: int) -> Result:
        """Run a worker without a tool, which compiles its kernels."""
        status, seconds, text = self._run([], "memcheck", operator, part)
        call_count, output = _number(r"calls made: (\d+)", text) or 0, [] if status == 0 else _tail(text)
        result = Result("none", operator, part, status == 0, call_count, None, status, seconds, output)
        print(result.line(), flush=True)
        return result

    def check(self, tool: str, operator: str, part: int) -> Result:
        """Run a worker under a tool."""
        prefix = [self._program, "--tool", tool, "--target-processes", "application-only", "--report-api-errors", "no"]
        status, seconds, text = self._run([*prefix, *OPTIONS[tool]], tool, operator, part)
        call_count, errors = _number(r"calls made: (\d+)", text), _number(TOOLS[tool], text)
        passed = bool(errors) if operator == PLANTED else status == 0 and errors == 0 and bool(call_count)
        result = Result(
            tool, operator, part, passed, call_count or 0, errors, status, seconds, [] if passed else _tail(text)
        )
        print(result.line(), flush=True)
        return result

    def _run(self, prefix: Sequence[str], tool: str, operator: str, part: int) -> tuple[int, float, str]:
        args = self._args
        worker = [sys.executable, __file__, "--work", operator, "--tool", tool, "--dtype", *args.dtype]
        worker += ["--device", args.device, "--backend", args.backend]
        worker += ["--part", str(part), "--parts", str(args.parts)]
        started = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            status = limited([*prefix, *worker], self._environment, args.timeout, output)
            output.seek(0)
            text = output.read()
        if status == TIMED_OUT:
            text += f"\nended after {args.timeout} s\n"
        return status, round(time.monotonic() - started, 1), text


def _number(pattern: str, text: str) -> int | None:
    matches = re.findall(pattern, text)
    return int(matches[-1]) if matches else None


def _tail(text: str) -> list[str]:
    """Return the first lines of the sanitizer, and the last lines of all."""
    lines = text.splitlines()
    return [line for line in lines if line.startswith("=====")][:40] + lines[-20:]


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("sanitize.py", "Run compute-sanitizer over the kernels of every operator.")
    cli.add_argument("--op", nargs="+", metavar="NAME", help="operators (default: all that have the backend)")
    cli.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    cli.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    cli.add_argument("--self-test", action="store_true", help="run only the kernels with a planted fault")
    cli.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    cli.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM", help="default: compute-sanitizer")
    cli.add_argument("--timeout", type=count(1), default=240, metavar="S", help="seconds per process")
    cli.add_argument("--jobs", type=count(1), default=4, help="processes to run at once")
    cli.add_argument("--parts", type=count(1), default=4, help="processes that share an operator's calls")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    cli.add_argument("--backend", default="triton", help="default: triton")
    cli.add_argument("--work", metavar="NAME", help=argparse.SUPPRESS)
    cli.add_argument("--part", type=int, help=argparse.SUPPRESS)
    return cli


def selected_operators(args: argparse.Namespace) -> list[str]:
    """Return the operators to check; an operator given by --op must have the backend."""
    if args.self_test:
        return []
    having = [
        name
        for name in kernel_registry.names()
        if args.backend in [backend.name for backend in kernel_registry.load(name).backends]
    ]
    for name in args.op or ():
        if name not in having:
            raise ValueError(f"--op: expected one of {', '.join(having)}, got {name!r}")
    return args.op or having


def check_all(sanitizer: Sanitizer, operators: Sequence[str], args: argparse.Namespace) -> list[Result]:
    """Compile everything, then check it; a part that fails without a tool is not run under one."""
    shares = [(name, part) for name in operators for part in range(args.parts)]
    with ThreadPoolExecutor(args.jobs) as pool:
        prepared = list(pool.map(lambda share: sanitizer.prepare(*share), shares))
        ready = [(result.operator, result.part) for result in prepared if result.passed]
        checks = [(tool, *share) for share in (*ready, (PLANTED, 0)) for tool in args.tool]
        checked = list(pool.map(lambda check: sanitizer.check(*check), checks))
    return [result for result in prepared if not result.passed] + checked


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if an error was found, or a planted fault was not."""
    args = parser().parse_args(argv)
    if args.work:
        return work(args.work, args)
    program = shutil.which(args.sanitizer)
    if program is None:
        parser().error(f"--sanitizer: no program {args.sanitizer!r} was found")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser().error("needs a GPU, and torch sees none")
    try:
        operators = selected_operators(args)
    except ValueError as error:
        parser().error(str(error))
    sanitizer = Sanitizer(program, args)
    results = check_all(sanitizer, operators, args)
    passed = all(result.passed for result in results)
    document: dict[str, Any] = {
        "sanitizer": sanitizer.version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "dtypes": args.dtype,
        "passed": passed,
        "results": [asdict(result) for result in results],
    }
    if args.json:
        write_json(args.json, document)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
