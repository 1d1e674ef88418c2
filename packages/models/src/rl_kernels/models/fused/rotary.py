"""Rotary embedding of queries and keys: one launch instead of PyTorch's fourteen, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order
from rl_kernels.core.triton_lib.launch import Launch, launch, next_power_of_2
from rl_kernels.models.fused.conditions import fits

DIMS, COS_DIMS = 4, 3
PART = 16
"""Heads that a program loads and rotates at a time."""


def takes(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Say whether ``rotary`` can replace ``q * cos + rotate_half(q) * sin`` here, for q and k."""
    if not fits(q, k) or not fits(cos, sin):
        return False
    if q.ndim != DIMS or k.ndim != DIMS or cos.ndim != COS_DIMS or not q.numel():
        return False
    # With FP32 weights under autocast, queries have the autocast dtype and angles are FP32.
    if cos.dtype not in (q.dtype, torch.float32) or cos.device != q.device:
        return False
    if cos.requires_grad or sin.requires_grad or cos.shape != sin.shape or cos.stride() != sin.stride():
        return False
    batch, _, tokens, size = q.shape
    rotated = cos.shape[2]
    fitting = k.shape[0] == batch and k.shape[2:] == q.shape[2:] and cos.shape[1] == tokens and 0 < rotated <= size
    contiguous = q.stride(-1) == k.stride(-1) == cos.stride(-1) == 1
    return fitting and contiguous and cos.shape[0] in (1, batch) and rotated % 2 == 0


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``q[B, H, T, D]`` and ``k[B, Hkv, T, D]`` rotated by ``cos, sin[B or 1, T, R]``, in the dtype of cos.

    The formula is RoFormer's (https://arxiv.org/abs/2104.09864) with halves in place of pairs, as in transformers, of
    the first R <= D numbers of a head; the others stay as they are. Each product is rounded to the dtype of the result,
    as in transformers. Gradients flow to q and k. ``takes`` checks the arguments.
    """
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad):
        return _rotate(q, k, cos, sin, cos.dtype, back=False)
    result: tuple[torch.Tensor, torch.Tensor] = _Rotary.apply(q, k, cos, sin)
    return result


def rotary_at(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``q[B, H, T, D]`` and ``k[B, Hkv, T, D]`` rotated by the rows ``places[B T]`` of ``cos, sin[P, D]``.

    The bits are those of ``rotary`` with these rows; no gradient. ``takes`` must accept q, k and these rows.
    """
    return _rotate(q, k, cos[None], sin[None], cos.dtype, back=False, places=places.contiguous())


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype,
    *,
    back: bool,
    places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from rl_kernels.models.fused import kernels

    q_out, k_out = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
    with device_of(q):
        launch(
            kernels.rotate,
            (q.shape[0] * q.shape[2],),
            *(q, k, cos, sin, q_out, k_out, cos if places is None else places),
            numbers=_numbers(q, k, cos, q_out, k_out, back=back, is_placed=places is not None),
            num_warps=4,
        )
    return q_out, k_out


def launch_of(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor) -> Launch:
    """Return the launch of ``rotary`` for tensors of these shapes and strides.

    It takes q, k, cos, sin, the results of q and k, and cos again, in place of the places of rows.
    """
    from rl_kernels.models.fused import kernels

    numbers = _numbers(q, k, cos, q_out, k_out, back=False, is_placed=False)
    return Launch(kernels.rotate, (q.shape[0] * q.shape[2],), numbers, num_warps=4)


def _numbers(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    back: bool,
    is_placed: bool,
) -> tuple[int, ...]:
    """Return the parameters of the kernel after its tensors."""
    _, heads, tokens, size = q.shape
    half = cos.shape[-1] // 2
    rest = size - 2 * half
    return (
        *(tokens, *q.stride()[:3], *k.stride()[:3], cos.stride(0) * (cos.shape[0] > 1), cos.stride(1)),
        *(*q_out.stride()[:3], *k_out.stride()[:3]),
        *(heads, k.shape[1], half, next_power_of_2(half), rest, next_power_of_2(max(rest, 1))),
        *(PART, back, is_placed),
    )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        save(ctx, cos, sin)
        ctx.dtype = q.dtype
        return _rotate(q, k, cos, sin, cos.dtype, back=False)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *first_order(_rotary_backward, dq, dk, *ctx.saved_tensors, ctx.dtype), None, None


def _rotary_backward(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    dq, dk = (readable(x, x.stride(-1) == 1) for x in (dq.resolve_neg(), dk.resolve_neg()))
    return _rotate(dq, dk, cos, sin, dtype, back=True)
