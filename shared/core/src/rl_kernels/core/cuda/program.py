"""A CUDA C++ file of a package with its constants and its target, and its compilation by NVRTC."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

SHIPPED = "cubins"
"""The folder beside a program's sources with the cubins that a wheel ships."""
FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")


class CompileError(RuntimeError):
    """A program could not be compiled; the message holds the file, the target and the compiler's log."""


@dataclass(frozen=True)
class Program:
    """The source, constants and target of one cubin.

    Attributes:
        package: import path of the package that the file is in.
        file: its file name. It can include the ``.cuh`` files beside it by name, and headers of core as
            ``rl_kernels/NAME.cuh``.
        arch: the compiler's name of the target, such as ``sm_90a``.
        defines: names and integer values, passed as ``-DNAME=VALUE``.
    """

    package: str
    file: str
    arch: str
    defines: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        values = "".join(f" {name}={value}" for name, value in self.defines)
        return f"{self.package}/{self.file}{values} for {self.arch}"


@dataclass(frozen=True)
class Compiled:
    """A cubin and the compiler's log: warnings, registers, spills."""

    cubin: bytes
    log: str


@dataclass(frozen=True)
class Inputs:
    """Everything that the compiler reads: with one compiler, equal inputs give equal cubins."""

    source: bytes
    headers: tuple[tuple[str, bytes], ...]
    options: tuple[str, ...]

    def digest(self, *more: str) -> str:
        """Return a digest of the inputs, and of further strings on which the cubin depends."""
        total = sha256()
        named = [*((name.encode(), text) for name, text in self.headers), (b"", self.source)]
        for part in (*(part for pair in named for part in pair), *(word.encode() for word in (*self.options, *more))):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
        return total.hexdigest()


def inputs_of(program: Program) -> Inputs:
    """Read the source and headers of a program.

    Raises:
        CompileError: the package has no such file.
    """
    folder = files(program.package)
    file = folder / program.file
    if not file.is_file():
        raise CompileError(f"{program}: there is no such file")
    shared = files("rl_kernels.core.cuda") / "include" / "rl_kernels"
    headers = [*_headers(shared, "rl_kernels/"), *_headers(folder, "")]
    defines = (f"-D{name}={value}" for name, value in program.defines)
    options = (f"--gpu-architecture={program.arch}", *FLAGS, *defines)
    return Inputs(file.read_bytes(), tuple(sorted(headers)), options)


def _headers(folder: Any, prefix: str) -> list[tuple[str, bytes]]:
    if not folder.is_dir():
        return []
    return [(prefix + file.name, file.read_bytes()) for file in folder.iterdir() if file.name.endswith(".cuh")]


def compile_program(program: Program) -> Compiled:
    """Compile a program into a cubin; no GPU and no driver is needed.

    Raises:
        CompileError: the compiler refused it.
    """
    from cuda.bindings import nvrtc

    inputs = inputs_of(program)
    names = [name.encode() for name, _ in inputs.headers]
    texts = [text for _, text in inputs.headers]
    status, handle = nvrtc.nvrtcCreateProgram(inputs.source, program.file.encode(), len(names), texts, names)
    _check(program, status)
    try:
        options = [option.encode() for option in inputs.options]
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        log = _read(program, handle, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = log.decode(errors="replace").strip("\0 \n")
        _check(program, status, text)
        return Compiled(_read(program, handle, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), text)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _read(program: Program, handle: Any, size: Any, read: Any) -> bytes:
    status, length = size(handle)
    _check(program, status)
    # A new bytearray: NVRTC writes to it, and equal bytes constants may be one Python object.
    buffer = bytearray(length)
    (status,) = read(handle, buffer)
    _check(program, status)
    return bytes(buffer)


def _check(program: Program, status: Any, log: str = "") -> None:
    if status:
        raise CompileError(f"{program}: {status.name}" + (f"\n{log}" if log else ""))
