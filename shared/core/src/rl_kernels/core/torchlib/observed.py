"""Detection of what observes or wraps current calls of ops: modes, transforms, tracers, a profiler, the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import (
    _dispatch_tls_is_dispatch_key_included,
    _functorch,
    _get_tracing_state,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
    _parse_dispatch_key,
)
from torch._C._autograd import _profiler_enabled
from torch.utils._python_dispatch import _disable_current_modes

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype, list})
"""Types of arguments that the dispatcher passes on unchanged; none of our lists holds tensors."""

# The vmap of torch.autograd.grad(..., is_grads_batched=True). Parsed once: looking a key up by name takes 3 us.
_BATCHES: Any = _parse_dispatch_key("VmapMode")


def are_plain(*values: Any) -> bool:
    """Say whether a kernel may read these values directly: no wrapper subclass, and no lazily negated view."""
    # PyTorch's dispatcher materializes such a view. A list, because a generator takes longer.
    return all([type(x) in PLAIN and not (isinstance(x, torch.Tensor) and x.is_neg()) for x in values])


def ops_are_observed() -> bool:
    """Say whether ops that are called now are observed, by a profiler or by anything that ``is_traced`` detects."""
    # Not a call of is_traced, which would take longer.
    return (
        _len_torch_dispatch_stack() > 0
        or _functorch.maybe_current_level() is not None
        or _dispatch_tls_is_dispatch_key_included(_BATCHES)
        or _is_torch_function_mode_enabled()
        or _get_tracing_state() is not None
        or _profiler_enabled()
    )


def is_traced() -> bool:
    """Say whether a mode, a transform of ``torch.func`` such as vmap, or a tracer is active."""
    return (
        _len_torch_dispatch_stack() > 0
        or _functorch.maybe_current_level() is not None
        or _dispatch_tls_is_dispatch_key_included(_BATCHES)
        or _is_torch_function_mode_enabled()
        or _get_tracing_state() is not None
    )


def values_hidden(value: torch.Tensor) -> bool:
    """Say whether a tensor's values cannot be read now: under torch.compile, or while a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (value.is_cuda and torch.cuda.is_current_stream_capturing())


@contextmanager
def without_modes() -> Iterator[None]:
    """Run a block outside inference mode, without gradients, and without modes that watch or replace PyTorch's ops."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        yield
