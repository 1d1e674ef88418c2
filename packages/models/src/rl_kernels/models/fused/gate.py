"""The gate of an MLP, ``silu(gate) * up``, in one launch; only the two factors are saved for backward."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order
from rl_kernels.core.triton_lib.launch import Launch, ceil_div, launch
from rl_kernels.models.fused.conditions import fits

BLOCK = 1024


def takes(gate: Any, up: Any) -> bool:
    """Say whether ``silu_mul`` can replace ``F.silu(gate) * up`` here."""
    return (
        fits(gate, up) and gate.shape == up.shape and bool(gate.numel()) and gate.is_contiguous() and up.is_contiguous()
    )


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, in the shape and dtype of both; both are differentiable.

    The formula is SwiGLU's (https://arxiv.org/abs/2002.05202). silu is rounded to the dtype before the product, as in
    PyTorch. ``takes`` checks the arguments.
    """
    if not torch.is_grad_enabled() or not (gate.requires_grad or up.requires_grad):
        return _product(gate, up)
    result: torch.Tensor = _SiluMul.apply(gate, up)
    return result


def _product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from rl_kernels.models.fused import kernels

    out = torch.empty_like(gate)
    with device_of(gate):
        grid = (ceil_div(gate.numel(), BLOCK),)
        launch(kernels.gate_forward, grid, gate, up, out, gate.numel(), BLOCK, num_warps=4)
    return out


def launch_of(count: int) -> Launch:
    """Return the launch that writes ``silu_mul(gate, up)`` of ``count`` numbers to its third argument."""
    from rl_kernels.models.fused import kernels

    return Launch(kernels.gate_forward, (ceil_div(count, BLOCK),), (count, BLOCK), num_warps=4)


def silu_mul_of_halves(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]`` of rows of 2 d numbers, with the bits of ``silu_mul``; no gradient.

    Args:
        x: contiguous; ``conditions.fits`` checks its device and dtype.
    """
    from rl_kernels.models.fused import kernels

    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    with device_of(x):
        grid = (ceil_div(out.numel(), BLOCK),)
        launch(kernels.gate_of_halves, grid, x, out, out.numel(), width, BLOCK, num_warps=4)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        save(ctx, gate, up)
        return _product(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return first_order(_silu_mul_backward, grad, *ctx.saved_tensors)


def _silu_mul_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from rl_kernels.models.fused import kernels

    grad = grad.resolve_neg().contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    with device_of(gate):
        grid = (ceil_div(gate.numel(), BLOCK),)
        launch(kernels.gate_backward, grid, grad, gate, up, d_gate, d_up, gate.numel(), BLOCK, num_warps=4)
    return d_gate, d_up
