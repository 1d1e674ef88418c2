"""Compile Triton kernels for a GPU that this machine lacks, and read the resources that they use.

Inside ``compiling(target)`` tensors of PyTorch's device ``meta``, which have no data, count as tensors of such a GPU. A
launch with them compiles the kernel and does nothing more. Triton keeps what it compiles in its own cache, where a
launch on that GPU finds it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from rl_kernels.core import operator
from rl_kernels.core.triton_lib import launch, schedule
from rl_kernels.core.triton_lib.targets import NVIDIA, Target
from rl_kernels.lab.compile import carried

SIZED, REGISTERS, FRAME = 4, 0x2F, 0x11
"""Codes in section .nv.info of a cubin: format of entries (symbol, value), and the entries of registers and stack."""


@dataclass(frozen=True)
class Used:
    """A compiled kernel and the resources that it uses.

    Attributes:
        kernel: its name.
        constants: values of its ``tl.constexpr`` parameters.
        dtype: dtype of its first tensor.
        warps: number of warps of a program.
        stages: number of loads in flight.
        registers: number of registers of a thread.
        shared: bytes of shared memory of a program.
        spills: bytes of local memory of a thread: spilled registers and the stack.
    """

    kernel: str
    constants: tuple[tuple[str, Any], ...]
    dtype: str
    warps: int
    stages: int
    registers: int
    shared: int
    spills: int

    @property
    def configuration(self) -> str:
        """The constants that are numbers, in a line."""
        return " ".join(f"{name}={int(value)}" for name, value in self.constants if isinstance(value, int))


@contextmanager
def compiling(target: Target) -> Iterator[list[Used]]:
    """Compile kernels that are launched on tensors of device ``meta``; each new kernel is appended to the list.

    A launch raises ``carried.LostValue`` in the exception of Triton's compiler if a loop would lose a value.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Used] = []
    known: set[int] = set()
    compile_kernel = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binary = compile_kernel(kernel, *args, grid=grid, warmup=True, **options)
        if id(binary) not in known:
            known.add(id(binary))
            kernels.append(_used(kernel, binary))

    with ExitStack() as stack:
        stack.enter_context(patch.dict(operator.archs_of_devices, meta=target.arch))
        stack.enter_context(patch.dict(schedule.processors_of_devices, meta=target.processors))
        stack.enter_context(patch.object(launch, "direct", True))
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(driver, "_active", _Driver(target)))
        stack.enter_context(carried.refusing())
        yield kernels


class _Driver:
    """Stands in for the driver of a GPU, as far as Triton's compiler uses it."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        name, nvidia = self._target.name, self._target.platform == NVIDIA
        return GPUTarget(self._target.platform, int(name[3:]) if nvidia else name, 32 if nvidia else 64)

    def get_current_device(self) -> str:
        # Triton keeps the kernels of each device apart.
        return self._target.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def _used(kernel: Any, binary: Any) -> Used:
    names = kernel.arg_names
    constants = tuple((names[place[0]], value) for place, value in binary.src.constants.items() if len(place) == 1)
    dtypes = [text.strip("*") for text in binary.src.signature.values() if str(text).startswith(("*", "tensordesc"))]
    counts = _amd_resources(binary.asm["amdgcn"]) if "amdgcn" in binary.asm else _nvidia_resources(binary.asm["cubin"])
    metadata = binary.metadata
    return Used(
        *(kernel.fn.__name__, constants, dtypes[0] if dtypes else "", metadata.num_warps, metadata.num_stages),
        *(counts[0], metadata.shared, counts[1]),
    )


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of local memory) of a thread, without the 0.2 s of ``cuobjdump -res-usage``."""
    offset, (size, count, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    # Fields of an ELF section: name, type, flags, address, offset, size.
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + place * size) for place in range(count)]
    values: dict[int, list[int]] = {REGISTERS: [], FRAME: []}
    for name, _, _, _, start, length in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] != b".nv.info":
            continue
        at = start
        while at < start + length:
            form, code, more = struct.unpack_from("<BBH", cubin, at)
            if form == SIZED and code in values:
                values[code].append(struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (more if form == SIZED else 0)
    return max(values[REGISTERS]), max(values[FRAME], default=0)


def _amd_resources(assembly: str) -> tuple[int, int]:
    """Return (registers, bytes of local memory) of a thread."""
    return _number(".vgpr_count", assembly), _number(".private_segment_fixed_size", assembly)


def _number(name: str, text: str) -> int:
    match = re.search(rf"{re.escape(name)}:\s*(\d+)", text)
    if match is None:
        raise ValueError(f"expected {name} in what the compiler reports, got {text[:200]!r}")
    return int(match[1])
