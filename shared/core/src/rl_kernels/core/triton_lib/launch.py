"""Where a Triton kernel can run, and how it is launched there; imports no Triton, so that anyone may ask."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Triton reads it when it is imported, so it is read once here too."""
INSTALLED = find_spec("triton") is not None


def why_not(call: Call) -> str | None:
    """Say why Triton cannot run a call, or return None."""
    if not INSTALLED:
        return "Triton is not installed: pip install 'rl-kernels-core[triton]'"
    if call.dtype == torch.float64:
        return "Triton kernels work in FP32; FP64 is for the native backend"
    if call.device.type == "cpu" and not INTERPRETED:
        return "on a CPU it runs under TRITON_INTERPRET=1 only"
    return None


def triton_backend(module: str) -> Backend:
    """Return the backend ``triton`` of an operator; on a CPU, where it is interpreted, it runs by name only."""
    return Backend("triton", module, {"cuda": INVARIANT, "cpu": INVARIANT}, why_not, by_name=frozenset({"cpu"}))


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
