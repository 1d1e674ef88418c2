"""Make a tensor's GPU current, which launching kernels through the CUDA driver requires."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import local

import torch

_HERE = nullcontext()
_thread = local()


def current() -> int:
    """Return the current GPU. It skips PyTorch's check for CUDA: call it only where a CUDA tensor exists."""
    index: int = torch._C._cuda_getDevice()
    return index


def stream_of(index: int) -> int:
    """Return the current stream of a GPU, as the driver takes it."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one, where kernels are launched."""
    return on_device(tensor.get_device()) if tensor.is_cuda else _HERE


def on_device(index: int) -> AbstractContextManager[object]:
    """Make a GPU the current one, and make sure that this thread has its context."""
    if index != current():
        return torch.cuda.device(index)
    if not hasattr(_thread, "has_context"):
        # We call the driver before PyTorch has set up a context, and an autograd thread may not have one yet. Recording
        # an event creates it.
        torch.cuda.Event().record()
        _thread.has_context = True
    return _HERE


@cache
def processors(index: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(index).multi_processor_count
