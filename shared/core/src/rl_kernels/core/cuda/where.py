"""Support check of CUDA C++ backends, before anything is compiled; imports no CUDA library."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from rl_kernels.core.cuda import cache, toolchain
from rl_kernels.core.operator import INVARIANT, Backend, Call, no_limits

ARCHS = re.compile(r"sm_\d+\+?")


def cuda_backend(
    name: str,
    module: str,
    *,
    archs: str,
    limits: Callable[[Call], str | None] = no_limits,
    sources: Sequence[str] = (),
) -> Backend:
    """Return a CUDA C++ backend of an operator.

    Args:
        name: ``cuda-generic``, ``cuda-sm90``.
        module: import path of its module.
        archs: architectures it has kernels for: ``sm_90`` (this one) or ``sm_80+`` (this and newer).
        limits: ``call -> reason``: further reasons against a call, asked last.
        sources: the packages that hold the CUDA sources of its programs, if not just the package of the module.
    """
    if ARCHS.fullmatch(archs) is None:
        raise ValueError(f"archs: expected sm_NUMBER or sm_NUMBER+, got {archs!r}")
    packages = tuple(sources) or (module.rpartition(".")[0],)

    def why_not(call: Call) -> str | None:
        if torch.version.hip is not None:
            return "CUDA C++ kernels are for NVIDIA GPUs, this PyTorch is for ROCm"
        if call.dtype == torch.float64:
            return "CUDA C++ kernels work in FP32; FP64 is for the native backend"
        reason = missing(packages, archs, call.arch)
        return limits(call) if reason is None else reason

    return Backend(name, module, {"cuda": INVARIANT}, why_not)


def target_of(arch: str, *, exact: bool) -> str:
    """Return the compiler's name of an architecture: ``sm90`` -> ``sm_90a`` if exact, else ``sm_90``.

    An exact target adds the instructions of that architecture only (WGMMA); its kernels run on no other.
    """
    return f"sm_{arch[2:]}{'a' if exact else ''}"


_missing: dict[tuple[tuple[str, ...], str, str], str | None] = {}
"""Cached results of ``missing``: installed packages do not change while a process runs, and every call asks."""


def missing(packages: tuple[str, ...], archs: str, arch: str) -> str | None:
    """Return why kernels of packages cannot be compiled for a GPU and loaded here, or None.

    Args:
        packages: the packages that hold the CUDA sources.
        archs: architectures it has kernels for, as ``cuda_backend`` takes them.
        arch: architecture of the GPU, as in ``Call``.
    """
    key = (packages, archs, arch)
    if key not in _missing:
        _missing[key] = _why_no_kernel(archs, arch) or _why_missing(packages, target_of(arch, exact=archs[-1] != "+"))
    return _missing[key]


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing calls the function
# once and takes its result as a constant.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_no_kernel(archs: str, arch: str) -> str | None:
    if not arch.startswith("sm"):
        return f"CUDA C++ kernels are for NVIDIA GPUs, this is {arch}"
    least, newer, number = int(archs[3:].rstrip("+")), archs[-1] == "+", int(arch[2:])
    if number < least:
        return f"needs sm_{least}{' or newer' if newer else ''}, this is sm_{number}"
    if number > least and not newer:
        return f"has kernels for sm_{least} alone, this is sm_{number}"
    return None


def _why_missing(packages: tuple[str, ...], arch: str) -> str | None:
    if toolchain.bindings_version() is None:
        return toolchain.why_no_compiler()
    if all(cache.ships(package, arch) for package in packages):
        return None
    reason = toolchain.why_no_compiler() or toolchain.why_not_loaded()
    number = int(re.sub(r"\D", "", arch))
    if reason is None and number not in toolchain.targets():
        major, minor = toolchain.nvrtc_version()
        return f"NVRTC of CUDA {major}.{minor} cannot compile for {arch}: install a newer one"
    return reason
