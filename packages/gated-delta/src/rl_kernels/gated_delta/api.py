"""The public function ``gated_delta_rule``: validation, dispatch, autograd."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.derivatives import first_order, no_lost_derivatives
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.gated_delta.op import OPERATOR, describe, ops


def gated_delta_rule(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, backend: str | None = None) -> torch.Tensor:
    """Return ``x + scale * y``, element by element.

    Computed in FP32 (in FP64 for FP64 inputs) and rounded once to the dtype of x. A row's result and its gradients
    depend on that row alone, bit for bit.

    Args:
        x: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides; differentiable.
        y: shape, dtype and device of x, any strides; differentiable.
        scale: a finite number.
        backend: name of a backend, ``auto``, or None: the backend that ``use_backend`` or ``RL_KERNELS_BACKEND``
            forces, otherwise ``auto``.

    Returns:
        ``[..., D]`` in the dtype of x.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform.
    """
    ready = _prepare(x, y, scale, backend)
    no_lost_derivatives("gated_delta_rule", x, y)
    arguments = _raw(x, y, scale)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    out: torch.Tensor = _GatedDeltaRule.apply(*arguments, ready) if needs_grad else ops["forward"].call(ready, *arguments)
    return out.view(x.shape)


@remembered
def _prepare(x: torch.Tensor, y: torch.Tensor, scale: float, backend: str | None) -> Ready:
    """Check the arguments, choose a backend, and prepare its launches."""
    check.tensor("x", x, check.FLOATS, least=1)
    check.tensor("y", y, check.FLOATS)
    check.same_dtype(x=x, y=y)
    check.same_device(x=x, y=y)
    check.shape("y", y, x.shape, "that of x")
    check.number("scale", scale)
    check.backend_name(backend)
    return ops["forward"].ready(*_raw(x, y, scale), choose(OPERATOR, describe(x), backend).name)


def _raw(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of the raw op, but for the backend."""
    rows = -1 if x.numel() else 0
    number = scalar(scale, compute_dtype(x.dtype))
    return x.reshape(rows, x.shape[-1]), y.reshape(rows, x.shape[-1]), number


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, ready: Ready) -> torch.Tensor:
        ctx.save_for_backward(scale)
        ctx.backend = ready.backend
        out: torch.Tensor = ops["forward"].call(ready, x, y, scale)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        return *first_order(ops["backward"], upstream, scale, ctx.backend), None, None
