"""The public function of the package: validation, dispatch, autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from rl_kernels.attention import checks
from rl_kernels.attention.choice import choose_backend
from rl_kernels.attention.inputs import UNLIMITED, Attended, Inputs, Window
from rl_kernels.attention.op import ops
from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import remembered
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, no_lost_derivatives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypedDict, Unpack

    from rl_kernels.core.distributed import Validate

    class Keywords(TypedDict, total=False):
        """Keyword arguments other than ``return_lse``, which determines the type of the result."""

        causal: bool
        scale: float | None
        window: Window | None
        softcap: float
        sinks: torch.Tensor | None
        cu_seqlens_q: torch.Tensor | None
        cu_seqlens_k: torch.Tensor | None
        max_seqlen_q: int | None
        max_seqlen_k: int | None
        k_start: torch.Tensor | None
        seqused_q: torch.Tensor | None
        seqused_k: torch.Tensor | None
        block_table: torch.Tensor | None
        process_group: ProcessGroup | DeviceMesh | None
        validate: Validate
        backend: str | None


@overload
def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Keywords],
) -> torch.Tensor: ...


@overload
def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Keywords],
) -> Attended: ...


@overload
def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[Keywords],
) -> torch.Tensor | Attended: ...


def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
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
    process_group: ProcessGroup | DeviceMesh | None = None,
    validate: Validate = True,
    backend: str | None = None,
) -> torch.Tensor | Attended:
    """Return ``softmax(scale q k^T) v`` for each head; its bits depend only on the query and the keys that it sees.

    A query gets the same bits in one call or in chunks, token by token with a cache, alone, padded or packed. In
    training, its gradient gets the same bits too. So do the gradients of its sequence's keys and values, alone, padded
    or packed, but not if the queries come in chunks. In a sequence of T queries and S keys, query t stands at position
    ``S - T + t``. Scores, softmax and sums are FP32. The weights are rounded to the dtype of the values, but not by
    ``native``, and the output is rounded once. q, k, v and sinks are differentiable; k and v of a cache are not. The
    formula is that of https://arxiv.org/abs/1706.03762.

    With ``process_group`` each rank has the rows of every sequence that ``context_shards`` gives it, of queries, keys
    and values alike. Output, lse and all gradients have the bits of one GPU, for any number of ranks. The gradients of
    keys and values are complete; that of sinks is a sum over the queries of this rank. All ranks must call it and run
    backward, one without rows too.

    Args:
        q: ``[B, T, H, D]``, or ``[total, H, D]`` with ``cu_seqlens_q``; FP32, BF16 or FP16; D is a multiple of 8.
        k: in the dtype of q: ``[B, S, Hkv, D]``, ``[total, Hkv, D]`` with ``cu_seqlens_k``, or
            ``[pages, page_size, Hkv, D]`` with ``block_table``, page_size a multiple of 16. Hkv divides H, and query
            head h reads KV head ``h // (H / Hkv)``.
        v: as k; its head size Dv may be another multiple of 8.
        causal: a query sees no key after its own position, as in a decoder; False as in FlashAttention and
            ``scaled_dot_product_attention``.
        scale: multiplies the scores, > 0; by default ``1 / sqrt(D)``.
        window: ``(left, right)``, integers >= 0: a query sees ``left`` keys before its position, the key there, and
            ``right`` keys after it; None or -1 is unlimited. With ``causal`` the right side is 0.
        softcap: c > 0 turns a score into ``c tanh(score / c)``; 0 is no cap.
        sinks: ``[H]``, FP32, BF16 or FP16: one more logit for each head; it takes part in the softmax, without a value.
            -inf: that head has no sink.
        cu_seqlens_q: ``[B + 1]``, int32 or int64: sequence b has the queries from ``cu_seqlens_q[b]`` up to, but not
            including, ``cu_seqlens_q[b + 1]``.
        cu_seqlens_k: the same for keys; only with ``cu_seqlens_q``.
        max_seqlen_q: at least the length of the longest sequence of queries; only with ``cu_seqlens_q``. None reads it
            from the device, which syncs. If it is too small and not validated, results are undefined.
        max_seqlen_k: the same for keys; only with ``cu_seqlens_k``.
        k_start: ``[B]``, int32 or int64: the first key of each sequence; keys before it are padding. With a ``window``
            that is limited on the left, -n says that a cache has dropped n keys before the first one given; no query
            sees those.
        seqused_q: ``[B]``, int32 or int64: the number of queries in use in each sequence. Later queries get 0, and
            their upstream gradient may be anything.
        seqused_k: ``[B]``, int32 or int64: the number of keys in use in a cache; query t of T then stands at
            ``seqused_k - T + t``.
        block_table: ``[B, n]``, int32 or int64: the pages of each sequence, in order; needs ``seqused_k``.
        return_lse: return ``Attended(out, lse)``.
        process_group: ranks that share each sequence: a ``ProcessGroup``, or one dim of a ``DeviceMesh``. With
            ``[B, T, H, D]`` a sequence has T rows on each rank; packed, ``cu_seqlens_q`` has the bounds of whole
            sequences, the same on all ranks, on any device: on a GPU it is read, which syncs. ``cu_seqlens_k`` is
            None or equal to it. Not with ``k_start``, ``seqused_q``, ``seqused_k``, ``block_table``, nor with a
            ``window`` that bounds keys after a query.
        validate: check the values of the integer tensors, which syncs with a GPU; skipped under torch.compile and while
            a CUDA graph is captured. Without the check nothing is read out of bounds, and a missing page gives NaN.
            In a group, unless it is False, the first call of a kind (dtypes, heads, options) compares the ranks: an
            error of one is then raised on all. ``"ranks"``, or ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, compares every call.
        backend: name of a backend; ``auto`` chooses one; None follows ``use_backend`` and ``RL_KERNELS_BACKEND``, and
            chooses one if neither is set.

    Returns:
        ``[B, T, H, Dv]`` or ``[total, H, Dv]`` in the dtype of q, or with ``return_lse`` an ``Attended``. A query that
        sees no key gets 0; its lse is -inf, or the logit of its sink.

    Raises:
        TypeError, ValueError: an argument is not as above, or k or v of a cache (``block_table``, ``seqused_k``)
            requires grad; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, a gradient of ``torch.func`` or double backward: not supported.
    """
    if process_group is not None:
        # Imported here: PyTorch may be built without torch.distributed.
        from rl_kernels.attention.parallel import Options, attention_over_ranks

        places = (cu_seqlens_q, cu_seqlens_k, k_start, seqused_q, seqused_k, block_table)
        given = Options(causal, scale, window, softcap, max_seqlen_q, max_seqlen_k, return_lse, validate, backend)
        attended = attention_over_ranks((q, k, v, sinks, *places), process_group, given)
        return attended if return_lse else attended.out
    left, right = checks.window(window, causal=causal, unlimited=UNLIMITED)
    needs_grad = torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in (q, k, v, sinks)])
    integer_tensors = (cu_seqlens_q, cu_seqlens_k, k_start, seqused_q, seqused_k, block_table)
    options = (max_seqlen_q, max_seqlen_k, scale, left, right, softcap)
    call = Inputs._make((q, k, v, sinks, *integer_tensors, *options))
    read = call if cu_seqlens_q is None else checks.with_longest(call)
    ready, numbers = _prepare(return_lse, needs_grad, backend, *read)
    is_dense = cu_seqlens_q is cu_seqlens_k is k_start is seqused_q is seqused_k is block_table is None
    if validate and not is_dense:
        checks.lengths(call)
    no_lost_derivatives("det_attention", q, k, v, sinks)
    if needs_grad:
        if seqused_k is not None or block_table is not None:
            checks.no_gradients_of_a_cache(k, v)
        settings = _Settings(integer_tensors, numbers, ready)
        out, lse = apply_of(_DetAttention, ready)(q, k, v, sinks, settings)
    elif return_lse:
        out, lse = ops["forward"].call(ready, q, k, v, sinks, *integer_tensors, *numbers)
    else:
        return ops["output"].call(ready, q, k, v, sinks, *integer_tensors, *numbers)
    return Attended(out, lse) if return_lse else out


class _Settings(NamedTuple):
    """What a call needs besides its operands; one tuple, because autograd inspects every argument."""

    integer_tensors: tuple[torch.Tensor | None, ...]
    numbers: tuple[float, ...]
    ready: Ready


@remembered
def _prepare(return_lse: bool, needs_grad: bool, backend: str | None, *fields: Any) -> tuple[Ready, tuple[float, ...]]:
    """Check a call, choose a backend and prepare its launches; return the numbers of ``Inputs`` too."""
    name, inputs = choose_backend(Inputs._make(fields), backend)
    check.flag("return_lse", return_lse)
    return ops["forward" if return_lse or needs_grad else "output"].ready(*inputs, name), inputs.numbers


class _DetAttention(torch.autograd.Function):
    """Saves the operands, out and lse; lse carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        integer_tensors, numbers, ready = settings
        out, lse = ops["forward"].call(ready, q, k, v, sinks, *integer_tensors, *numbers)
        save(ctx, q, k, v, sinks, *integer_tensors, out, lse)
        ctx.numbers, ctx.backend = numbers, ready.backend
        ctx.mark_non_differentiable(lse)
        # Otherwise autograd would make a zero gradient for lse.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needed)
        *tensors, out, lse = ctx.saved_tensors
        needs = (needed[0], needed[1] or needed[2])
        computed = first_order(ops["backward"], *tensors, *ctx.numbers, out, lse, grad, *needs, ctx.backend)
        return *[value if is_needed else None for value, is_needed in zip(computed, needed, strict=False)], None
