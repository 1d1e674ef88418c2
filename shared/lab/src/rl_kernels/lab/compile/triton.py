"""``rl-kernels compile --backend triton``: compile Triton's kernels for GPUs that this machine lacks.

A backend's module ``ahead`` yields calls on tensors without data, which launch every kernel in every configuration.
The shared memory of a compiled kernel is checked against the GPU's limit.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from rl_kernels.core.contract import DTYPES
from rl_kernels.core.operator import Operator
from rl_kernels.core.registry import kernel_registry
from rl_kernels.core.triton_lib.launch import INSTALLED, INTERPRETED
from rl_kernels.core.triton_lib.targets import TARGETS
from rl_kernels.lab.compile import ahead

NAME = "triton"
COMPILED = ("bf16", "fp32")
"""Dtypes of the calls. FP16 is omitted: its kernels use the same resources as BF16 kernels."""
HEADER = ("operator", "arch", "kernels", "registers", "spills", "shared", "of")
DETAILS = ("operator", "arch", "kernel", "dtype", "configuration", "warps", "stages", "registers", "spills", "shared")


class Task(NamedTuple):
    """A unit of compilation for one process: an operator's calls in one dtype, for one target."""

    operator: str
    target: str
    dtype: str


class Compiled(NamedTuple):
    """Resources that the kernels of a task use, and the calls that failed."""

    task: Task
    used: Sequence[ahead.Used]
    failed: Sequence[str]


def why_not() -> str | None:
    """Return why Triton cannot compile here, or None."""
    if not INSTALLED:
        return "Triton is not installed: pip install triton"
    return "Triton interprets: unset TRITON_INTERPRET" if INTERPRETED else None


def tasks(names: Sequence[str], archs: Sequence[str], dtypes: Sequence[str] = COMPILED) -> list[Task]:
    """Return the tasks for operators, targets and dtypes.

    Raises:
        ValueError: an operator has no Triton backend, or nothing is compiled for a target.
    """
    unknown = [arch for arch in archs if arch not in TARGETS]
    if unknown:
        raise ValueError(f"--arch: Triton's kernels are compiled for {', '.join(TARGETS)}, got {unknown[0]!r}")
    without = [name for name in names if not _has_triton(kernel_registry.load(name))]
    if without:
        raise ValueError(f"--op: {', '.join(without)} has no Triton backend")
    chosen = names or [name for name in kernel_registry.names() if _has_triton(kernel_registry.load(name))]
    if not chosen:
        raise ValueError("no installed operator has a Triton backend")
    return [Task(name, arch, dtype) for name in chosen for arch in archs or TARGETS for dtype in dtypes]


def compile_all(pending: Sequence[Task]) -> Iterator[Compiled]:
    """Compile tasks on all cores."""
    jobs = min(len(pending), os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compiled, pending)


def compiled(task: Task) -> Compiled:
    """Compile the kernels that the calls of a task launch."""
    folder = kernel_registry.load(task.operator).backend(NAME).module.rpartition(".")[0]
    try:
        calls = importlib.import_module(f"{folder}.ahead").calls
    except ModuleNotFoundError as error:
        return Compiled(task, (), [f"{' '.join(task)}: expected a module {folder}.ahead that yields calls: {error}"])
    failed = []
    with ahead.compiling(TARGETS[task.target]) as used:
        for call in calls(DTYPES[task.dtype]):
            try:
                call()
            except Exception as error:
                failed.append(f"{' '.join(task)}: {_name_of(call)}: {type(error).__name__}: {error}")
    return Compiled(task, used, failed)


def summary(results: Sequence[Compiled]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each operator and target: number of kernels, and the largest use of each resource."""
    for name, arch in dict.fromkeys((result.task.operator, result.task.target) for result in results):
        used = [kernel for result in results if result.task[:2] == (name, arch) for kernel in result.used]
        most = (max((getattr(kernel, of) for kernel in used), default=0) for of in ("registers", "spills", "shared"))
        yield name, arch, *map(str, (len(used), *most, TARGETS[arch].shared))


def document(results: Sequence[Compiled]) -> dict[str, Any]:
    """Return the summary and the versions of Triton and PyTorch, as plain values for JSON."""
    rows = [dict(zip(HEADER, (*row[:2], *map(int, row[2:])), strict=True)) for row in summary(results)]
    # Builds for ROCm have another name as a package.
    triton = importlib.import_module("triton").__version__
    return {"version": 1, "environment": {"triton": triton, "torch": torch.__version__}, "records": rows}


def details(results: Sequence[Compiled]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kernel."""
    for task, used, _ in results:
        for kernel in used:
            numbers = map(str, (kernel.warps, kernel.stages, kernel.registers, kernel.spills, kernel.shared))
            yield task.operator, task.target, kernel.kernel, task.dtype, kernel.configuration, *numbers


def faults(results: Sequence[Compiled]) -> Iterator[str]:
    """Yield a message for each call that failed and each kernel that does not fit."""
    for task, used, failed in results:
        yield from failed
        limit = TARGETS[task.target].shared
        for kernel in used:
            if kernel.shared > limit:
                subject = f"{' '.join(task)}: {kernel.kernel} {kernel.configuration}"
                yield f"{subject}: {kernel.shared} bytes of shared memory, of {limit}"


def _has_triton(operator: Operator) -> bool:
    return any(backend.name == NAME for backend in operator.backends)


def _name_of(call: object) -> str:
    function = call.func if isinstance(call, partial) else call
    return getattr(function, "__name__", str(function))
