"""The CUDA toolchain here: versions of cuda.bindings, NVRTC and the driver, and why one is missing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch


@cache
def bindings_version() -> str | None:
    """Return the version of cuda-bindings, or None if it is not installed."""
    try:
        return version("cuda-bindings") if find_spec("cuda.bindings") else None
    except (ImportError, PackageNotFoundError):
        return None


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises:
        ImportError: cuda-bindings is not installed.
        OSError: NVRTC cannot be loaded; the message says why.
    """
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        # cuda.bindings reports a missing library in this way.
        raise OSError((str(error).strip() or "no reason is given").splitlines()[0]) from error
    if status:
        raise OSError(status.name)
    return major, minor


@cache
def targets() -> frozenset[int]:
    """Return the compute capabilities that NVRTC compiles for, as 10 * major + minor; raises as ``nvrtc_version``."""
    from cuda.bindings import nvrtc

    nvrtc_version()
    status, archs = nvrtc.nvrtcGetSupportedArchs()
    if status:
        raise OSError(status.name)
    return frozenset(archs)


@cache
def driver_major() -> int | None:
    """Return the major version of CUDA that the driver supports, or None where torch sees no GPU."""
    if not torch.cuda.is_available():
        # Without a driver, a call to it may never return.
        return None
    from cuda.bindings import driver

    status, number = driver.cuDriverGetVersion()
    return None if status else number // 1000


def why_no_compiler() -> str | None:
    """Return why programs cannot be compiled here, or None."""
    if bindings_version() is None:
        return "cuda-bindings is not installed: pip install cuda-bindings"
    try:
        nvrtc_version()
    except (ImportError, OSError) as error:
        major = (bindings_version() or "").partition(".")[0]
        name = "nvidia-cuda-nvrtc-cu12" if major == "12" else f"'nvidia-cuda-nvrtc=={major}.*'"
        return f"NVRTC cannot be loaded ({error}): pip install {name}"
    return None


def why_not_loaded() -> str | None:
    """Return why the driver cannot load what NVRTC compiles, or None; call it only where NVRTC is installed."""
    (major, minor), known = nvrtc_version(), driver_major()
    if known is None or known >= major:
        return None
    older = f"install cuda-bindings and NVRTC of CUDA {known}"
    return f"the driver knows CUDA {known}, NVRTC is that of CUDA {major}.{minor}: update the driver, or {older}"
