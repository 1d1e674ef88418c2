"""The public function of the package: validation, dispatch, autograd."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from rl_kernels.attention import checks
from rl_kernels.attention.inputs import UNLIMITED, Attended, Inputs
from rl_kernels.attention.op import OPERATOR, describe, ops
from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose, remembered_choice
from rl_kernels.core.torchlib import first_order, no_lost_derivatives

Window = tuple[int | None, int | None]


@overload
def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_start: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor: ...


@overload
def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_start: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_lse: Literal[True],
    validate: bool = True,
    backend: str | None = None,
) -> Attended: ...


@overload
def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_start: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_lse: bool,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | Attended: ...


def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_start: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | Attended:
    """Return ``softmax(scale q k^T) v`` for each head; a query's bits follow from it and the keys that it sees.

    Whole, in chunks, token by token with a cache, alone, padded or packed, a query gets the same bits, and in training
    so do its gradient and those of its sequence's keys. Query t of T stands at position ``S - T + t`` of its sequence's
    S keys. Scores, softmax and sums are FP32, the weights are rounded to the dtype of the values, the output once.

    Args:
        q: ``[B, T, H, D]``, or ``[total, H, D]`` with ``cu_seqlens_q``; FP32, BF16 or FP16; D is a multiple of 8.
        k: ``[B, S, Hkv, D]``, ``[total, Hkv, D]`` with ``cu_seqlens_k``, or ``[pages, page_size, Hkv, D]`` with
            ``block_table``, page_size a multiple of 16; Hkv divides H, and query head h reads head ``h // (H / Hkv)``.
        v: as k; its head size may be another multiple of 8.
        causal: a query sees no key behind its own position.
        scale: of the scores, > 0; by default ``1 / sqrt(D)``.
        window: ``(left, right)``: a query sees that many keys before and behind its position; None or -1 is unlimited.
        softcap: c > 0 makes a score ``c tanh(score / c)``; 0 leaves it.
        sinks: ``[H]``, FP32, BF16 or FP16: a logit for each head that takes part in the softmax and has no value.
        cu_seqlens_q: ``[B + 1]``, int32 or int64: sequence b has the queries from ``cu_seqlens_q[b]`` to the next.
        cu_seqlens_k: the same of the keys, with ``cu_seqlens_q`` only.
        max_seqlen_q: no less than the longest sequence of queries; without it the device is asked, which syncs.
        max_seqlen_k: the same of keys.
        k_start: ``[B]``: the first key of each sequence; those before it are padding. With a ``window`` that ends on
            the left it may be negative: a cache has dropped that many keys in front of the others; none is seen.
        seqused_q: ``[B]``: queries in use of each sequence; later ones get 0, and their upstream gradient may be
            anything.
        seqused_k: ``[B]``: keys in use of a cache; query t of T then stands at ``seqused_k - T + t``.
        block_table: ``[B, n]``: the pages of each sequence, in order; needs ``seqused_k``.
        return_lse: return ``Attended(out, lse)``.
        validate: check the values of the integers, which syncs with a GPU; skipped under torch.compile and graph
            capture. Unchecked, nothing is read out of bounds, and a page that does not exist gives NaN.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Returns:
        The shape of q with v's head size, in its dtype; a query that sees no key gets 0 and an lse of -inf, or with
        sinks that of its sink. With ``return_lse``, ``Attended``.

    Raises:
        TypeError, ValueError: an argument is not as above, or k or v of a cache (``block_table``, ``seqused_k``)
            requires grad; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
    """
    where = (cu_seqlens_q, cu_seqlens_k, k_start, seqused_q, seqused_k, block_table)
    chosen = _chosen(q, k, v, sinks, *where, scale, softcap, return_lse, backend)
    left, right = checks.window(window, causal=causal, unlimited=UNLIMITED)
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    if validate:
        checks.lengths(q, k, *where, windowed=left != UNLIMITED)
    most_k = k.shape[0] if cu_seqlens_k is not None else k.shape[1]
    if block_table is not None:
        most_k *= block_table.shape[1]
    most_q = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
    longest = (
        checks.longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q, most_q, values=validate),
        checks.longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k, most_k, values=validate),
    )
    no_lost_derivatives("det_attention", q, k, v, sinks)
    given = Inputs(q, k, v, sinks, *where, *longest, float(factor), left, right, float(softcap))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _requires_grad(sinks)):
        _validate_gradients(given)
        out, lse = _DetAttention.apply(*given, chosen)
    else:
        out, lse = ops["forward"](*given, chosen)
    return Attended(out, lse) if return_lse else out


@remembered_choice
def _chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    k_start: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    backend: str | None,
) -> str:
    """Check what is no value of a tensor; return the backend."""
    checks.heads(q, k, v, sinks, packed_q=cu_seqlens_q is not None, packed_k=cu_seqlens_k is not None)
    checks.layout(q, k, cu_seqlens_q, cu_seqlens_k, k_start, seqused_q, seqused_k, block_table)
    check.number("scale", q.shape[-1] ** -0.5 if scale is None else scale, above=0)
    check.number("softcap", softcap, least=0)
    check.flag("return_lse", return_lse)
    check.backend_name(backend)
    return choose(OPERATOR, describe(q, k, v), backend).name


def _requires_grad(sinks: torch.Tensor | None) -> bool:
    return sinks is not None and sinks.requires_grad


def _validate_gradients(given: Inputs) -> None:
    if given.seqused_k is None and given.block_table is None:
        return
    for name, value in (("k", given.k), ("v", given.v)):
        if value.requires_grad:
            raise ValueError(f"{name}: expected no gradient of a cache (block_table, seqused_k), detach it")


class _DetAttention(torch.autograd.Function):
    """Saves the operands, out and lse; lse carries no gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *given, backend = arguments
        out, lse = ops["forward"](*given, backend)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*tensors, out, lse)
        ctx.given = [None if isinstance(value, torch.Tensor) else (value,) for value in given]
        ctx.backend = backend
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *saved, out, lse = ctx.saved_tensors
        tensors = iter(saved)
        given = [next(tensors) if other is None else other[0] for other in ctx.given]
        needs = ctx.needs_input_grad
        dq, dk, dv, dsinks = first_order(ops["backward"], *given, out, lse, grad, needs[1] or needs[2], ctx.backend)
        found: list[torch.Tensor | None] = [dq, dk, dv, dsinks]
        return *(value if needs[place] else None for place, value in enumerate(found)), *[None] * (len(given) - 3)
