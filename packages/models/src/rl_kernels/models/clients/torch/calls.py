"""Translate a call of PyTorch's flash attention to det_attention, and refuse options that it does not have."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.attention import Attended, det_attention
from rl_kernels.models.paged import PAGE, page_layout

UNLIMITED = -1
"""An unlimited side of a window, in PyTorch and here; in PyTorch also None."""
PACKED_DIMS = 3


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Attended:
    """Return out and lse of a call of PyTorch's flash attention, in the layout of det_attention.

    Args:
        query: ``[B, T, H, D]``, or ``[total, H, D]`` with ``cum_seq_q``; FP32, BF16 or FP16.
        key: ``[B, S, Hkv, D]``, ``[total, Hkv, D]`` with ``cum_seq_k``, or ``[pages, page_size, Hkv, D]`` with
            ``block_table``; Hkv divides H.
        value: as key.
        cum_seq_q: ``[B + 1]``, int32 or int64: cumulative lengths of packed queries.
        cum_seq_k: the same for keys; ignored with ``block_table``, where ``seqused_k`` holds the lengths.
        max_q: at least the length of the longest sequence of packed queries; ignored if they are dense.
        max_k: the same for keys.
        dropout_p: must be 0.
        is_causal: whether a query sees no key after its position.
        return_debug_mask: must be False.
        scale: multiplies the scores; None is ``1 / sqrt(D)``.
        window_size_left: keys that a query sees before its position; None and -1 are all.
        window_size_right: the same after its position.
        seqused_k: ``[B]``: number of keys in use in each sequence. For packed keys without pages, each call copies the
            keys to pages.
        alibi_slopes: must be None.
        block_table: ``[B, n]``: the pages of each sequence; needs ``seqused_k``.
        num_splits: number of parts into which FlashAttention splits the keys; ignored: our splits change no bit.

    Raises:
        TypeError, ValueError: det_attention has no such option; the message names it.
    """
    refuse(query, value, dropout_p)
    if return_debug_mask:
        raise ValueError("return_debug_mask: expected False, det_attention keeps no matrix of weights")
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes: expected None, det_attention has no bias; use a model without ALiBi")
    sequence_arguments: dict[str, Any] = {"seqused_k": seqused_k, "block_table": block_table}
    if seqused_k is None and block_table is None:
        sequence_arguments |= packed(key, cum_seq_q, cum_seq_k, max_q, max_k)
    else:
        _refuse_gradients(query, key, value)
        if seqused_k is None:
            raise ValueError("seqused_k: expected the number of keys in use of each sequence with block_table")
        if block_table is None and cum_seq_k is not None:
            key, value, sequence_arguments = _in_pages(key, value, cum_seq_k, max_k, seqused_k)
        if cum_seq_q is not None:
            sequence_arguments |= {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
    with torch.no_grad():
        return det_attention(
            query,
            key,
            value,
            causal=is_causal,
            scale=scale,
            window=window(window_size_left, window_size_right),
            **sequence_arguments,
            return_lse=True,
            validate=False,
        )


def refuse(query: torch.Tensor, value: torch.Tensor, dropout_p: float) -> None:
    """Refuse dropout, and values with another head size, which PyTorch's ops do not support."""
    if dropout_p:
        raise ValueError(
            f"dropout_p: expected 0, got {dropout_p}: det_attention has none, draws would depend on the batch; "
            "set the dropout of attention to 0, or undo activate()"
        )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(f"value: expected head size {query.shape[-1]}, that of query, got shape {tuple(value.shape)}")


def _refuse_gradients(*operands: torch.Tensor) -> None:
    """Refuse gradients with a cache: PyTorch's backward op does not take seqused_k and block_table."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        raise ValueError(
            "seqused_k: expected no gradient with seqused_k or block_table, the backward pass does not get them; "
            "call under torch.no_grad()"
        )


def window(left: int | None, right: int | None) -> tuple[int, int]:
    """Return the window in det_attention's form."""
    sides = []
    for name, side in (("window_size_left", left), ("window_size_right", right)):
        sides.append(UNLIMITED if side is None else side)
        if sides[-1] < UNLIMITED:
            raise ValueError(f"{name}: expected a number of keys, or -1 or None for all keys, got {side}")
    return sides[0], sides[1]


def packed(
    key: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
) -> dict[str, Any]:
    """Return the arguments of det_attention for packed sequences without a cache."""
    arguments: dict[str, Any] = {}
    if cum_seq_q is None and cum_seq_k is not None:
        raise ValueError("cum_seq_k: expected None without cum_seq_q, packed keys need packed queries")
    if cum_seq_q is not None:
        arguments = {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
        if cum_seq_k is not None:
            arguments |= {"cu_seqlens_k": cum_seq_k, "max_seqlen_k": max_k}
        elif key.ndim == PACKED_DIMS:
            raise ValueError("cum_seq_k: expected the starts of packed sequences of keys, got None without block_table")
    return arguments


def _in_pages(
    key: torch.Tensor, value: torch.Tensor, cum_seq_k: torch.Tensor, max_k: int, seqused_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Copy packed keys with unused room to pages: det_attention has no packed cache."""
    if cum_seq_k.shape[0] == 1 or not key.shape[0]:
        # Nothing to copy: no sequence, or no key.
        return key, value, {"cu_seqlens_k": cum_seq_k, "max_seqlen_k": max_k}
    none_dropped = torch.zeros_like(seqused_k, dtype=torch.int64)
    source, table, _ = page_layout(cum_seq_k.long(), none_dropped, key.shape[0], max_k)
    key, value = (x.index_select(0, source).unflatten(0, (-1, PAGE)) for x in (key, value))
    return key, value, {"block_table": table, "seqused_k": seqused_k}


def laid_out(like: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a result with the strides of ``torch.empty_like(like)``, which PyTorch's compiler expects."""
    if result.stride() == like.stride():
        return result
    copy = torch.empty_like(like)
    return result if copy.stride() == result.stride() else copy.copy_(result)


def auxiliary(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return placeholders: two for the state of an unused random generator, one for an unused debug mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)
