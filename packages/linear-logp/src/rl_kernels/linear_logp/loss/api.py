"""The public function ``linear_logp_loss``: a loss and its gradients, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from rl_kernels.core import validate as check
from rl_kernels.core.main_grad import fold_grad_into_main_grad, refuse_checkpoint
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.linear_logp.arguments import LEAN, MemoryUse, Options
from rl_kernels.linear_logp.autograd import agreed
from rl_kernels.linear_logp.loss.chunks import ChunkedLoss, Gradients, Loss, chunks_of, offsets_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rl_kernels.core.distributed import Validate
    from rl_kernels.linear_logp.vocabulary import VocabCuts


# A loss is differentiated in the forward pass, which cannot be traced. torch.compiler.disable would do, but it imports
# the compiler at once.
@_disable_dynamo
def linear_logp_loss(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    loss: Loss,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    chunk_tokens: int = 4096,
    grad_scale: float = 1.0,
    temperature: float | torch.Tensor = 1.0,
    min_logit: torch.Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: bool = False,
    join_tokens: int | None = None,
    memory: MemoryUse = LEAN,
    process_group: ProcessGroup | DeviceMesh | None = None,
    vocab_size: int | VocabCuts | None = None,
    vocab_segments: int | None = None,
    validate: Validate = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of all sequences; their gradients are computed at once, chunk by chunk.

    For each chunk of whole sequences: the log-probabilities as in ``linear_logp``, ``loss`` of them, and the gradients.
    By default a chunk's logits are computed once, and memory holds those of one chunk. The losses are added by trees
    over 4096 sequences, in ascending order.

    If the losses of ``loss`` and their gradients depend on their own sequence alone, loss and gradients have the bits
    of ``linear_logp``, ``loss`` of all its log-probabilities, their sum and its backward pass, for every
    ``chunk_tokens``. grpo_loss's ``sequence_losses`` with a ``normalizer`` is such a loss.

    Where gradients are enabled, they are computed now, for an upstream gradient of ``grad_scale``: backward only
    returns them, once. With ``lm_head_weight.main_grad`` (FP32) that of the weight is added to it now, even if ``loss``
    raises in a later chunk, a target there is below ``min_logit``, or no backward pass follows;
    ``torch.utils.checkpoint`` around the call, which would add it twice, is refused. Without it, a batch of several
    chunks takes an FP32 buffer ``[V, D]``. Under ``torch.compile`` the call breaks the graph.

    Args:
        hidden: ``[N, D]`` packed tokens, or ``[B, T, D]`` without ``cu_seqlens``; otherwise as in ``linear_logp``.
        lm_head_weight: ``[V, D]``, as in ``linear_logp``.
        target_ids: ``[N]`` or ``[B, T]``, as in ``linear_logp``.
        loss: ``(logp, chunk) -> losses``. logp is FP32 (FP64 for FP64 inputs), ``[n]`` for the n tokens of the chunk,
            or ``[S, T]``; ``LogpStats`` of such tensors with ``return_stats``. chunk is a ``Chunk``: which sequences
            and tokens these are. losses is ``[S]``, one number a sequence.
        bias: ``[V]``, as in ``linear_logp``.
        cu_seqlens: ``[S + 1]``: offsets of the sequences, from 0 to N; sequences may be empty. Reading a tensor on a
            GPU syncs. It must be None while a CUDA graph is captured.
        chunk_tokens: tokens of a chunk, >= 1. A longer sequence is a chunk of its own. It changes no bit.
        grad_scale: the upstream gradient of the result, such as 1 / steps of gradient accumulation.
        temperature: as in ``linear_logp``, as all arguments that follow.
        min_logit: in the shape of target_ids; logits below it count as -inf.
        softcap: >= 0.
        logit_scale: > 0.
        ignore_index: positions with this id have log-probability 0 and no gradient.
        return_stats: give the loss ``LogpStats``.
        join_tokens: None, or a multiple of 16, as in ``linear_logp``. Chunks then meet at its multiples: the rows of a
            chunk after the last multiple are recomputed with the next one, and their logits kept beside its own. Give
            at most ``chunk_tokens``, or each chunk recomputes chunks before it.
        memory: a chunk's logits, ``4 chunk_tokens V`` bytes, stay in memory until its gradients are computed.
            ``"fast"``: these are formed in one piece, as in ``linear_logp``. ``Memory(...)``: ``workspace_mib`` bounds
            them; with ``saved_mib`` fewer logits stay, those of the last columns, and the others are recomputed.
        process_group: ranks that share the vocabulary; ``loss`` must be the same on all.
        vocab_size: V, the columns of the whole vocabulary, or ``VocabCuts``.
        vocab_segments: 1 or 8.
        validate: check values as ``linear_logp`` does, that ``loss`` is differentiable in the log-probabilities alone,
            and the upstream gradient, which syncs. Without it, another upstream gradient fails on the device.
        backend: name of a backend, ``auto``, or None.

    Returns:
        the loss, a scalar in the dtype of the log-probabilities.

    Raises:
        TypeError, ValueError: an argument, or what ``loss`` returns, is not as described, or the call adds to
            ``main_grad`` inside ``torch.utils.checkpoint``; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: in backward: the upstream gradient is not ``grad_scale``, or the pass is a second one.
    """
    if not callable(loss):
        raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
    check.integer("chunk_tokens", chunk_tokens, least=1)
    check.number("grad_scale", grad_scale, dtype=torch.float32)
    options = Options(
        *(temperature, min_logit, softcap, logit_scale, ignore_index, return_stats, join_tokens),
        *(memory, vocab_size, vocab_segments, validate, backend),
    )
    operands, call = agreed(hidden, lm_head_weight, target_ids, bias, process_group, options)
    if cu_seqlens is not None and values_hidden(hidden):
        raise ValueError("cu_seqlens: expected None while a CUDA graph is captured, give hidden as [B, T, D]")
    offsets = offsets_of(cu_seqlens, target_ids.shape)
    length = target_ids.shape[1] if cu_seqlens is None else None
    chunks = tuple(chunks_of(offsets, chunk_tokens, hidden.device, length))
    is_checked = validate and not values_hidden(hidden)
    chunked = ChunkedLoss(operands, call, loss, chunks, length, grad_scale, is_checked)
    if not call.needs_gradient:
        return chunked.losses()
    if call.main_grad is not None:
        refuse_checkpoint("lm_head_weight.main_grad", "linear_logp_loss", "call it outside, or call linear_logp there")
    total, gradients = chunked.with_gradients()
    result: torch.Tensor = _PrecomputedGradients.apply(total, gradients, grad_scale, is_checked, *operands)
    if call.main_grad is not None:
        fold_grad_into_main_grad("lm_head_weight", lm_head_weight, result)
    return result


class _PrecomputedGradients(torch.autograd.Function):
    """Returns a loss; backward returns the gradients computed in forward, once."""

    @staticmethod
    def forward(
        ctx: Any,
        total: torch.Tensor,
        gradients: Gradients,
        grad_scale: float,
        is_checked: bool,
        *_: Any,
    ) -> torch.Tensor:
        """Return the loss."""
        # Not saved tensors: what backward returns must have no other owner, or autograd would copy it.
        ctx.gradients, ctx.grad_scale, ctx.is_checked = gradients, grad_scale, is_checked
        return total.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, if the upstream gradient is that of the forward pass."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "linear_logp_loss: expected one backward pass, which returns the gradients computed in forward"
            )
        expected = torch.full_like(upstream, ctx.grad_scale)
        if ctx.is_checked and not torch.equal(upstream, expected):
            raise RuntimeError(
                f"linear_logp_loss: expected the upstream gradient {ctx.grad_scale:g}, got {float(upstream):g}; "
                "give it as grad_scale, because the gradients are computed in the forward pass"
            )
        if not ctx.is_checked:
            torch._assert_async(upstream == expected, "linear_logp_loss: the upstream gradient is not grad_scale")
        return None, None, None, None, *gradients
