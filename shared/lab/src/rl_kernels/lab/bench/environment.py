"""The environment of a benchmark, for its record: versions and device."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

from rl_kernels.core.operator import arch_of


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(device: torch.device, packages: Iterable[str]) -> dict[str, str]:
    """Return the environment of the times: device, date, and the installed versions of ``packages``."""
    facts = {
        "device": _device_name(device),
        "arch": arch_of(device.type, device.index),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "driver": _driver() if device.type == "cuda" else "",
        "threads": str(torch.get_num_threads()),
    }
    # A GPU build of PyTorch may install Triton under another distribution name.
    triton = installed("triton") or installed("pytorch-triton") or installed("pytorch-triton-rocm")
    facts |= {name: installed(name) or "" for name in ("rl-kernels-core", "numpy", *packages)}
    return {name: value for name, value in {**facts, "triton": triton or ""}.items() if value}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
