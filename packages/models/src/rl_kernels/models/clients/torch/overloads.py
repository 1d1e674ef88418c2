"""PyTorch's flash attention ops on det_attention: the meaning of each argument, and what is refused.

``scaled_dot_product_attention`` calls ``_scaled_dot_product_flash_attention`` with ``[B, H, T, D]``; ``varlen_attn``
and nested tensors call ``_flash_attention_forward`` with ``[B, T, H, D]``, or packed ``[total, H, D]``; autograd calls
the backward of either. Their arguments follow the schemas of PyTorch 2.13.

Causal queries stand where FlashAttention-2 places them: query t of T at ``S - T + t``. (``is_causal`` of
``scaled_dot_product_attention`` counts positions from the first key: if T != S, PyTorch does not use flash attention
for it. ``causal_lower_right`` of ``torch.nn.attention.bias`` aligns the last query with the last key, and calls this
op.)

Integers of sequences and pages are not checked, as in FlashAttention: reading them would wait for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_kernels.attention.gradients import det_attention_backward
from rl_kernels.models.clients.torch import calls


def flash_attention_forward(query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, rng_state, unused, debug_attn_mask): ``aten::_flash_attention_forward``.

    The arguments are those of ``calls.attend``.

    Returns:
        out in the shape and strides of ``torch.empty_like(query)``; lse to base e, FP32, ``[B, H, T]`` or
        ``[H, total]``, -inf if a query sees no key; zeros for the generator's state; an empty mask.

    Raises:
        TypeError, ValueError: det_attention has no such option, or an argument is not as there; the message names it.
    """
    attended = calls.attend(query, *args, **options)
    return calls.laid_out(query, attended.out), attended.lse, *calls.auxiliary(query)


def flash_attention_forward_inplace(out: Tensor, query: Tensor, *args: Any, **options: Any) -> Tensor:
    """Write to ``out``, return lse: ``aten::_flash_attention_forward_no_dropout_inplace``, of ``varlen_attn_out``.

    The arguments after query are those of ``calls.attend``; out has the shape and dtype of query.

    Raises:
        TypeError, ValueError: as in ``flash_attention_forward``, or ``out`` is of another shape or dtype.
    """
    if out.shape != query.shape or out.dtype != query.dtype:
        expected, got = (f"{x.dtype} {tuple(x.shape)}" for x in (query, out))
        raise ValueError(f"out: expected {expected} as query has, got {got}")
    attended = calls.attend(query, *args, **options)
    out.copy_(attended.out)
    return attended.lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value in their layouts: ``aten::_flash_attention_backward``.

    The arguments are inputs and results of ``flash_attention_forward``; ``grad_out`` is the gradient of out.

    Raises:
        TypeError, ValueError: as in ``flash_attention_forward``.
    """
    calls.refuse(query, value, dropout_p)
    with torch.no_grad():
        gradients = det_attention_backward(
            *(grad_out, query, key, value, out, logsumexp),
            causal=is_causal,
            scale=scale,
            window=calls.window(window_size_left, window_size_right),
            **calls.packed(key, cum_seq_q, cum_seq_k, max_q, max_k),
            validate=False,
        )
        dq, dk, dv = (calls.laid_out(x, dx) for x, dx in zip((query, key, value), gradients, strict=True))
    return dq, dk, dv


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """Return results as ``flash_attention_forward``, heads first: ``aten::_scaled_dot_product_flash_attention``.

    Args:
        query: ``[B, H, T, D]``, FP32, BF16 or FP16.
        key: ``[B, Hkv, S, D]``; Hkv divides H.
        value: as key.
        dropout_p: must be 0.
        is_causal: whether query t, at position ``S - T + t``, sees no key after its position.
        return_debug_mask: must be False.
        scale: multiplies the scores; None is ``1 / sqrt(D)``.

    Returns:
        out as ``torch.empty_like(query)``, lse ``[B, H, T]``, None and None for cumulative lengths, T, S, generator
        state, unused, and an empty mask.

    Raises:
        TypeError, ValueError: as in ``flash_attention_forward``.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    longest = query.shape[2], key.shape[2]
    attended = calls.attend(q, k, v, None, None, *longest, dropout_p, is_causal, return_debug_mask, scale=scale)
    return (
        calls.laid_out(query, attended.out.transpose(1, 2)),
        attended.lse,
        None,
        None,
        *longest,
        *calls.auxiliary(query),
    )


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients, heads first: ``aten::_scaled_dot_product_flash_attention_backward``.

    The arguments are inputs and results of ``sdpa_forward``; ``grad_out`` is the gradient of out.

    Raises:
        TypeError, ValueError: as ``flash_attention_backward``.
    """
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    options = dropout_p, is_causal, philox_seed, philox_offset
    gradients = flash_attention_backward(grad, q, k, v, o, logsumexp, None, None, max_q, max_k, *options, scale=scale)
    dq, dk, dv = (dx.transpose(1, 2) for dx in gradients)
    return dq, dk, dv
