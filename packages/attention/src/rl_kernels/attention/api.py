"""The public function of the package: validation, dispatch, autograd."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch

from rl_kernels.attention import checks
from rl_kernels.attention.inputs import UNLIMITED, Attended, Inputs
from rl_kernels.attention.op import OPERATOR, describe, ops
from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose, planned_choice
from rl_kernels.core.torchlib import are_plain, first_order, no_lost_derivatives, ops_are_observed

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
    left, right = checks.window(window, causal=causal, unlimited=UNLIMITED)
    chosen, plan = _chosen(q, k, v, sinks, *where, scale, left, right, softcap, return_lse, backend)
    nowhere = cu_seqlens_q is cu_seqlens_k is k_start is seqused_q is seqused_k is block_table is None
    if validate and not nowhere:
        checks.lengths(q, k, *where, windowed=left != UNLIMITED)
    if plan is None or max_seqlen_q is not None or max_seqlen_k is not None:
        most_q, most_k = _most(q, k, cu_seqlens_q, cu_seqlens_k, block_table)
        longest = (
            checks.longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q, most_q, values=validate),
            checks.longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k, most_k, values=validate),
        )
        factor = _factor(q, scale)
        given = Inputs(q, k, v, sinks, *where, *longest, factor, left, right, float(softcap))
    else:
        given = Inputs(q, k, v, sinks, *where, *plan.numbers)
    no_lost_derivatives("det_attention", q, k, v, sinks)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _requires_grad(sinks)):
        _validate_gradients(given)
        out, lse = _DetAttention.apply(*given[:4], given[4:], chosen, plan)
    else:
        out, lse = _forward(given, chosen, plan, with_lse=return_lse)
    return Attended(out, lse) if return_lse else out


class _Plan(NamedTuple):
    """What is known of calls of one kind: the numbers of ``Inputs``, and what a backend has planned, or None."""

    numbers: tuple[Any, ...]
    launches: Any


def _plan(name: str, *arguments: Any) -> _Plan | None:
    """Return what is known of a kind of arguments, those of ``_chosen``; None of packed queries, whose lengths vary."""
    *tensors, scale, left, right, softcap, _, _ = arguments
    q, k, _, _, cu_seqlens_q, cu_seqlens_k, *_, block_table = tensors
    if cu_seqlens_q is not None:
        return None
    most = _most(q, k, cu_seqlens_q, cu_seqlens_k, block_table)
    given = Inputs._make([*tensors, *most, _factor(q, scale), left, right, float(softcap)])
    make = getattr(OPERATOR.backend(name).load(), "planned", None)
    return _Plan(given.numbers, make(given) if make and are_plain(*tensors) else None)


@planned_choice(_plan)
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
    left: int,
    right: int,
    softcap: float,
    return_lse: bool,
    backend: str | None,
) -> str:
    """Check what is no value of a tensor; return the backend. The sides of the window were checked, for plans."""
    checks.heads(q, k, v, sinks, packed_q=cu_seqlens_q is not None, packed_k=cu_seqlens_k is not None)
    checks.layout(q, k, cu_seqlens_q, cu_seqlens_k, k_start, seqused_q, seqused_k, block_table)
    if scale is not None:
        check.number("scale", scale, above=0)
    check.number("softcap", softcap, least=0)
    check.flag("return_lse", return_lse)
    check.backend_name(backend)
    return choose(OPERATOR, describe(q, k, v), backend).name


def _most(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> tuple[int, int]:
    """Return the most queries and keys that a sequence can have."""
    most_k = k.shape[0] if cu_seqlens_k is not None else k.shape[1]
    if block_table is not None:
        most_k *= block_table.shape[1]
    return q.shape[0] if cu_seqlens_q is not None else q.shape[1], most_k


def _factor(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _requires_grad(sinks: torch.Tensor | None) -> bool:
    return sinks is not None and sinks.requires_grad


def _validate_gradients(given: Inputs) -> None:
    if given.seqused_k is None and given.block_table is None:
        return
    for name, value in (("k", given.k), ("v", given.v)):
        if value.requires_grad:
            raise ValueError(f"{name}: expected no gradient of a cache (block_table, seqused_k), detach it")


def _forward(given: Inputs, chosen: str, plan: _Plan | None, *, with_lse: bool) -> tuple[torch.Tensor, Any]:
    """Return (out, lse), the latter perhaps None unless it is asked for."""
    if plan is not None and plan.launches is not None and not ops_are_observed():
        found: tuple[torch.Tensor, torch.Tensor | None] | None = plan.launches.forward(given, with_lse=with_lse)
        if found is not None:
            return found
    return ops["forward"](*given, chosen)


class _DetAttention(torch.autograd.Function):
    """Saves the operands, out and lse; lse carries no gradient.

    What has no gradient comes as one argument: autograd looks at each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        others: tuple[Any, ...],
        backend: str,
        plan: _Plan | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = Inputs(q, k, v, sinks, *others)
        out, lse = _forward(inputs, backend, plan, with_lse=True)
        ctx.save_for_backward(*inputs.operands, *inputs.others, out, lse)
        ctx.numbers, ctx.backend, ctx.plan = inputs.numbers, backend, plan
        ctx.mark_non_differentiable(lse)
        # Or zeros would be made for lse.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needs)
        *tensors, out, lse = ctx.saved_tensors
        given = Inputs(*tensors, *ctx.numbers)
        rest = (out, lse, grad, needs[1] or needs[2])
        no_lost_derivatives("det_attention", *tensors, grad)
        found = None
        # A gradient that may be differentiated itself takes the general path, which refuses that.
        planned = None if ctx.plan is None else ctx.plan.launches
        if planned is not None and not (torch.compiler.is_compiling() or torch.is_grad_enabled() or ops_are_observed()):
            found = planned.backward(given, *rest)
        if found is None:
            found = first_order(ops["backward"], *given, *rest, ctx.backend)
        gradients = [value if need else None for value, need in zip(found, needs, strict=False)]
        return *gradients, *[None] * (len(needs) - len(gradients))
