"""Record which kernels are launched, in CUDA C++ and Triton, and which of them are a backend's own.

The methods that launch a kernel are replaced while something is recorded, so launches cost nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from rl_kernels.core.cuda import launch as cuda_launch
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.where import target_of
from rl_kernels.core.operator import Backend
from rl_kernels.core.triton_lib.launch import INSTALLED, INTERPRETED, Launch

OURS = "rl_kernels."
"""Prefix of the modules whose Triton kernels are recorded: PyTorch's compiler launches others."""
SHARED = "rl_kernels.core."
"""Kernels in core belong to every backend that launches them."""


class Launched(NamedTuple):
    """A kernel that was launched."""

    source: str
    """The package of a CUDA program, or the module of a Triton kernel."""
    file: str
    """The file of a CUDA program; empty for Triton."""
    entry: str
    """Name of the kernel."""
    target: str
    """The compiler's name of a CUDA program's target, such as ``sm_90a``; empty for Triton."""

    def __str__(self) -> str:
        if not self.file:
            return f"{self.source}.{self.entry}"
        return f"{self.source}/{self.file}:{self.entry} for {self.target}"


@contextmanager
def record_launches() -> Iterator[set[Launched]]:
    """Collect the kernels that any thread launches inside the block; the set is filled when the block ends."""
    kernels: set[Launched] = set()
    programs: dict[int, cuda_launch.Kernel] = {}
    jitted: dict[int, Any] = {}
    with ExitStack() as stack:
        _watch(stack, cuda_launch.Kernel, "start", lambda kernel: programs.setdefault(id(kernel), kernel))
        _watch(stack, Launch, "__call__", lambda launch: jitted.setdefault(id(launch._kernel), launch._kernel))
        if INSTALLED and (INTERPRETED or torch.cuda.is_available()):
            from triton.compiler import CompiledKernel
            from triton.runtime.jit import KernelInterface

            _watch(stack, KernelInterface, "__getitem__", lambda kernel: jitted.setdefault(id(kernel), kernel))
            _watch(stack, CompiledKernel, "__getitem__", lambda compiled: jitted.setdefault(id(compiled), compiled.src))
        yield kernels
    known = {id(kernel): program for (program, _, _), kernel in cuda_launch._kernels.items()}
    for key, kernel in programs.items():
        program = known[key]
        kernels.add(Launched(program.package, program.file, kernel.entry, program.arch))
    kernels.update(filter(None, map(_jitted, jitted.values())))


def _watch(stack: ExitStack, owner: Any, name: str, note: Callable[[Any], object]) -> None:
    original = getattr(owner, name)

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        note(self)
        return original(self, *args, **options)

    stack.enter_context(patch.object(owner, name, watched))


def _jitted(kernel: Any) -> Launched | None:
    """Describe one of our Triton kernels, given as ``triton.jit`` made it or as the source of a compiled one."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    module = getattr(kernel, "__module__", None) or ""
    return Launched(module, "", kernel.__name__, "") if module.startswith(OURS) else None


def owns(backend: Backend, arch: str) -> Callable[[Launched], bool] | None:
    """Return a function that says whether a kernel is a backend's own; None if it is made of PyTorch's ops.

    A CUDA backend owns what it compiles for the most specific target of the GPU. Another backend may share its other
    programs: ``cuda-sm90`` may use what ``cuda-generic`` compiles for ``sm_90``, so only those for ``sm_90a`` are its
    own. A Triton backend owns the kernels of its package, and those of core.

    Args:
        backend: the backend.
        arch: the GPU's architecture, as in ``Call``.
    """
    if backend.name == "native":
        return None
    module = backend.load()
    if not hasattr(module, "programs"):
        package = backend.module.partition(".backends.")[0] + "."
        return lambda kernel: not kernel.file and kernel.source.startswith((package, SHARED))
    targets = [target_of(arch, exact=exact) for exact in (True, False)]
    programs: list[Program] = next(filter(None, map(module.programs, targets)), [])
    own = {(program.package, program.file, program.arch) for program in programs}
    return lambda kernel: (kernel.source, kernel.file, kernel.target) in own
