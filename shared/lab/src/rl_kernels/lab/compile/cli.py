"""``rl-kernels compile``: compile the kernels of the installed operators before they are needed.

Exit status 0: every kernel was compiled, and those in CUDA saved, without a warning, products that wait for each other,
a spilled register or a stack; Triton kernels fit into the GPU. 1: one was not, or does not fit. 2: bad arguments,
nothing to compile, no compiler, or a folder that cannot be used, reported before anything is compiled. It needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rl_kernels.core.command import Parser, json_rows, location, table
from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.cuda.program import Compiled, CompileError, Program, compile_program, inputs_of
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import arch_of
from rl_kernels.core.registry import UnknownOperator, kernel_registry
from rl_kernels.core.testing.resources import resources_of, serialized_in, warnings_of
from rl_kernels.lab.compile import triton

USAGE = 2
PREFIX = "cuda-"
ALL = "all"
DTYPES = {"fp32": 0, "bf16": 1, "fp16": 2}
"""The value of a program's ``DTYPE``."""
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
"""The targets of ``--arch all``."""
HEADER = ("operator", "file", "defines", "arch", "kernel", "registers", "shared", "spills", "stack")


def parser() -> Parser:
    """Return the parser."""
    command = Parser("rl-kernels compile", "Compile the kernels of operators; no GPU is needed.")
    command.add_argument(
        "--op", action="append", metavar="NAME", help="operator (default: every one with such kernels)"
    )
    command.add_argument(
        "--backend",
        choices=("cuda", triton.NAME),
        default="cuda",
        help="cuda: compile what will be run; triton: compile every configuration, and check its shared memory against"
        " the GPU's limit",
    )
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--verbose", action="store_true", help="with triton: print a row for each kernel")
    shown.add_argument("--json", action="store_true", help="with triton: print strict JSON, and nothing else")
    command.add_argument(
        "--arch",
        nargs="+",
        type=_arch,
        metavar="ARCH",
        help=f"targets such as sm_90a, or {ALL} (default: for the GPUs of this machine; without one, {ALL})",
    )
    command.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"only kernels of these dtypes (default: all; with triton {' '.join(triton.COMPILED)})",
    )
    command.add_argument(
        "--out", type=location, metavar="DIR", help="write the cubins to DIR, for shipping (default: to the cache)"
    )
    command.add_argument("--package", metavar="NAME", help="only kernels whose sources are in this package")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the kernels and print what they use; return the exit status."""
    try:
        args = parser().parse_args(argv)
        if args.backend == triton.NAME:
            return _triton(args)
        if args.verbose or args.json:
            raise ValueError("--verbose, --json: expected only with --backend triton")
        programs = _programs(args)
        _check_folder(args.out)
    except (UnknownOperator, ValueError) as error:
        print(f"rl-kernels compile: {error}", file=sys.stderr)
        return USAGE
    rows, faults = _compile_all(programs, args.out)
    print(table(HEADER, rows))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _compile_all(programs: Sequence[tuple[str, Program]], out: Path | None) -> tuple[list[tuple[str, ...]], list[str]]:
    """Compile on all cores and write in order; return a row for each kernel, and the faults."""
    rows: list[tuple[str, ...]] = []
    faults: list[str] = []
    # Threads suffice: NVRTC runs outside of Python's lock.
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        results = pool.map(_try_compile, (program for _, program in programs))
        for number, ((name, program), compiled) in enumerate(zip(programs, results, strict=True), 1):
            if sys.stderr.isatty():
                print(f"\rcompiled {number} of {len(programs)}", end="", file=sys.stderr, flush=True)
            if isinstance(compiled, CompileError):
                faults.append(str(compiled))
                continue
            try:
                _write(program, compiled, out)
            except OSError as error:
                # Writing the next one would fail too.
                faults.append(f"rl-kernels compile: cannot write {program} to {out or cache.folder()}: {error}")
                break
            rows += _rows(name, program, compiled)
            faults += _faults(program, compiled)
    finally:
        pool.shutdown(cancel_futures=True)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    return rows, faults


def _try_compile(program: Program) -> Compiled | CompileError:
    try:
        return compile_program(program)
    except CompileError as error:
        return error


def _triton(args: argparse.Namespace) -> int:
    reason = triton.why_not()
    if reason or args.out is not None or args.package is not None:
        raise ValueError(reason or "--out, --package: expected only with --backend cuda")
    named = [arch for arch in args.arch or () if arch != ALL]
    compiled = list(triton.compile_all(triton.tasks(args.op or (), named, args.dtype or triton.COMPILED)))
    faults = list(triton.faults(compiled))
    if args.json:
        print(json_rows(triton.document(compiled)))
    elif args.verbose:
        print(table(triton.DETAILS, list(triton.details(compiled))))
    else:
        print(table(triton.HEADER, list(triton.summary(compiled))))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _arch(text: str) -> str:
    if text != ALL and not re.fullmatch(r"sm_\d+[af]?|gfx\w+", text):
        raise argparse.ArgumentTypeError(f"expected a target such as sm_80 or sm_90a, or {ALL}, got {text!r}")
    return text


def _archs(requested: Sequence[str] | None) -> list[str]:
    if requested is None and torch.cuda.is_available():
        local_archs = [arch_of("cuda", index) for index in range(torch.cuda.device_count())]
        return list(dict.fromkeys(target_of(arch, exact=exact) for arch in local_archs for exact in (False, True)))
    archs = [*dict.fromkeys(arch for word in requested or [ALL] for arch in (ARCHS if word == ALL else (word,)))]
    known = toolchain.targets()
    for arch in archs:
        if int(re.sub(r"\D", "", arch)) not in known:
            raise ValueError(f"--arch: NVRTC compiles for {', '.join(f'sm_{n}' for n in sorted(known))}, got {arch!r}")
    return archs


def _programs(args: argparse.Namespace) -> list[tuple[str, Program]]:
    """Return the programs to compile, each with the name of its operator."""
    operators = [kernel_registry.load(name) for name in args.op or kernel_registry.names()]
    backends = {operator.name: [b for b in operator.backends if b.name.startswith(PREFIX)] for operator in operators}
    without = [name for name, cuda_backends in backends.items() if not cuda_backends]
    if args.op and without:
        raise ValueError(f"--op: {', '.join(without)} has no CUDA backend")
    if len(without) == len(operators):
        raise ValueError("no installed operator has a CUDA backend")
    reason = toolchain.why_no_compiler()
    if reason:
        raise ValueError(reason)
    archs = _archs(args.arch)
    programs = [
        (name, program)
        for name, cuda_backends in backends.items()
        for backend in cuda_backends
        for arch in archs
        for program in backend.load().programs(arch)
    ]
    if not programs:
        raise ValueError(f"--arch: there are no kernels for {', '.join(archs)}")
    packages = {program.package for _, program in programs}
    if args.package is not None:
        if args.package not in packages:
            raise ValueError(f"--package: kernels are in {', '.join(sorted(packages))}, got {args.package!r}")
        programs = [(name, program) for name, program in programs if program.package == args.package]
    if args.dtype is not None:
        programs = [(name, program) for name, program in programs if _has_dtype(program, args.dtype)]
        if not programs:
            raise ValueError(f"--dtype: there are no kernels of {', '.join(args.dtype)}")
    # Operators that share a program compile it once.
    first = {program: name for name, program in reversed(programs)}
    return [(name, program) for program, name in reversed(first.items())]


def _has_dtype(program: Program, dtypes: Sequence[str]) -> bool:
    """Return whether a program has one of these dtypes, or no dtype."""
    code = dict(program.defines).get("DTYPE")
    return code is None or code in [DTYPES[name] for name in dtypes]


def _check_folder(out: Path | None) -> None:
    if out is None:
        reason = cache.trouble()
        if reason:
            raise ValueError(reason)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {error}") from error
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out: {out} cannot be written")


def _write(program: Program, compiled: Compiled, out: Path | None) -> None:
    inputs = inputs_of(program)
    if out is None:
        cache.store(cache.path_of(inputs), compiled.cubin)
    else:
        cache.write(out / cache.shipped_name(program, inputs), compiled.cubin)


def _rows(name: str, program: Program, compiled: Compiled) -> Iterator[tuple[str, ...]]:
    defines = " ".join(f"{key}={value}" for key, value in program.defines)
    for used in resources_of(compiled.log):
        counts = map(str, (used.registers, used.shared, used.spills, used.stack))
        yield name, program.file, defines, program.arch, used.entry, *counts


def _faults(program: Program, compiled: Compiled) -> list[str]:
    warnings = (*warnings_of(compiled.log), *serialized_in(compiled.log))
    faults = [f"{program}: {line}" for line in warnings]
    for used in resources_of(compiled.log):
        if used.spills or used.stack:
            faults.append(f"{program}: {used.entry} spills {used.spills} bytes and has a stack of {used.stack}")
    return faults
