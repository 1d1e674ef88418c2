"""The public functions ``linear_logp`` and, to skip a later forward pass, ``linear_logp_known`` and ``_from_known``.

A rollout under ``invariant`` computes the numbers of training: the first update can skip its forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from rl_kernels.core.main_grad import fold_grad_into_main_grad
from rl_kernels.core.outputs import LogpStats
from rl_kernels.core.torchlib.derivatives import apply_of
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.linear_logp.arguments import LEAN, Call, MemoryUse, Options
from rl_kernels.linear_logp.autograd import LinearLogp, agreed, check_known, check_targets, forward
from rl_kernels.linear_logp.known import Known

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from rl_kernels.core.distributed import Validate
    from rl_kernels.linear_logp.vocabulary import VocabCuts


class Keywords(TypedDict, total=False):
    """The keyword arguments of ``linear_logp`` that its type does not depend on."""

    temperature: float | torch.Tensor
    min_logit: torch.Tensor | None
    kept_ids: torch.Tensor | None
    softcap: float
    logit_scale: float
    ignore_index: int | None
    join_tokens: int | None
    memory: MemoryUse
    process_group: ProcessGroup | DeviceMesh | None
    vocab_size: int | VocabCuts | None
    vocab_segments: Literal[1, 8] | None
    validate: Validate
    backend: str | None


@overload
def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[Keywords],
) -> torch.Tensor: ...


@overload
def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_stats: Literal[True],
    **options: Unpack[Keywords],
) -> LogpStats: ...


@overload
def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_stats: bool,
    **options: Unpack[Keywords],
) -> torch.Tensor | LogpStats: ...


def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    min_logit: torch.Tensor | None = None,
    kept_ids: torch.Tensor | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: bool = False,
    join_tokens: int | None = None,
    memory: MemoryUse = LEAN,
    process_group: ProcessGroup | DeviceMesh | None = None,
    vocab_size: int | VocabCuts | None = None,
    vocab_segments: Literal[1, 8] | None = None,
    validate: Validate = True,
    backend: str | None = None,
) -> torch.Tensor | LogpStats:
    """Return the log-probability of each target: ``z[id] - logsumexp(z)``, without materializing the logits.

    ``memory="fast"`` keeps the logits for backward: as much memory as ``torch.compile`` takes, three products in place
    of four, the same bits.

    ``z = x / temperature`` with ``x = logit_scale (hidden @ W^T + bias)``; with a softcap it is
    ``z = softcap tanh(x / softcap) / temperature``. With p = softmax(z), the entropy is ``-sum(p log p)``, in nats.
    No rounding takes a log-probability above 0 or an entropy below 0.

    By default memory holds the logits of only one piece of the vocabulary for one block of rows at any time. They are
    never rounded below FP32 (FP64 for FP64 inputs). A row's result and its row of the gradient of ``hidden`` depend on
    that row and the weights alone, bit for bit. The gradients of weight and bias are sums over tokens in a fixed order:
    they are repeatable, and appending ignored rows does not change them.

    If ``lm_head_weight.main_grad`` exists (FP32, with the shape and device of the weight), backward adds the weight's
    gradient to it in place, and nothing to ``.grad``. Micro-batches cut at multiples of 16 tokens then give the bits of
    the whole batch; with ``join_tokens``, at multiples of that. A gradient that another op puts into ``.grad`` in the
    same pass, such as the embedding of a tied weight, is moved to ``main_grad`` at the end of the pass (eager only).

    Under ``torch.autocast`` hidden, weight and bias are cast as ``F.linear`` casts its operands. As there, autocast on
    a GPU with gradients off keeps the cast copy of a parameter until its outermost block ends.

    With ``process_group`` each rank has a shard of the vocabulary, and all have the same hidden states and ids. Every
    rank gets the results and the gradient of ``hidden`` of the whole vocabulary, and the gradients of its shard: the
    bits of one GPU for 1, 2, 4 and 8 ranks, the gradient of ``hidden`` those of one GPU with ``vocab_segments=8``. All
    ranks must ask for the gradient of ``hidden``, or none.

    Args:
        hidden: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides; differentiable.
        lm_head_weight: ``[V, D]``, dtype and device of ``hidden``, any strides; differentiable. With ``process_group``
            this rank's rows: see ``vocab_size``. With it, also a DTensor that is sharded on dim 0 over these ranks.
        target_ids: ``[...]``, int64 or int32, each in ``[0, V)`` or equal to ``ignore_index``.
        bias: ``[V]``, dtype and device of ``hidden``, or None; differentiable. ``-inf`` masks an entry. With
            ``process_group`` that of this rank's rows.
        temperature: a number > 0, or a floating-point tensor of no dims or ``[...]`` (one value per token) that does
            not require grad.
        min_logit: None, or ``[...]`` in FP32 (FP64 for FP64 inputs), without grad: in each row only entries with
            ``z >= min_logit`` count; the others have probability 0 and a gradient of exactly 0. z is the quotient that
            PyTorch gives for tensors, ``linear_logits(...).logits / temperature[..., None]``. ``-inf`` keeps all, with
            the bits of None. A target that is not kept has a log-probability of -inf, without a gradient. A row of
            which nothing is kept gives NaN.
        kept_ids: None, or ``[..., K]``, int64 or int32, each in ``[0, V)`` or -1: in each row only entries with these
            ids count, as if the logits of others were -inf. Their order, duplicates and -1 change no bit. A target that
            is not among them has a log-probability of -inf, without a gradient. A row of which nothing is kept gives
            NaN. The forward pass holds all logits of a block of rows: ``memory.workspace_mib``, by default 256 MiB, or
            64 rows; ``memory.saved_mib`` has no effect, and ``"fast"`` is ``"lean"``. Not with ``min_logit``, a group
            of several ranks, or known statistics.
        softcap: >= 0; bound of the logits before the temperature (Gemma 2 uses 30), or 0 for none.
        logit_scale: > 0; multiplies the logits before the cap, as in Cohere models. For Granite give
            ``1 / logits_scaling``.
        ignore_index: positions with this id give 0 in every output and get zero gradient. Their hidden states have no
            effect and add nothing to the gradients of weight and bias.
        return_stats: return ``LogpStats(logp, logsumexp, entropy)``, all differentiable.
        join_tokens: None, or a multiple of 16: the gradients of weight and bias are then sums of chains of that many
            tokens, added in order and rounded to nearest. Tokens count from the first of the call, ignored ones too.
            One long chain shrinks on Hopper, because tensor cores truncate. Of the workspace it takes one FP32 buffer
            of the gradient of a piece of the weight, without ``main_grad`` two.
        memory: ``"lean"``: no logits of more than 64 tokens stay in memory from forward to backward (on a CPU 64 MiB of
            them). ``"fast"``: all stay, in FP32, and backward frees them before it allocates gradients: at most the
            larger of 6 N V and 2 N V + 2 (N + V) D bytes for 16-bit inputs, V rounded up to a multiple of 256; the
            Guide says where it is more. ``Memory(...)``: limits in MiB. No bit depends on it.
        process_group: 1, 2, 4 or 8 ranks that share the vocabulary: a ``ProcessGroup``, or one dim of a
            ``DeviceMesh``. None: this process has all of it.
        vocab_size: V, the columns of the whole vocabulary; needed in a group of several ranks, but for a DTensor.
            Rows of the weight beyond them, which pad the vocabulary, have no effect, and a gradient of 0. How the ranks
            share it is found from the number of rows, which are those of ``vocab_shards(vocab_size, ranks)[rank]``, or
            of a vocabulary that is cut evenly, padded by fewer than 128 rows a rank or not; for other cuts give
            ``VocabCuts(V, cuts)``. Other cuts than those of ``vocab_shards`` change no bit; see the guide for what they
            exchange, and under torch.compile they raise.
        vocab_segments: how the gradient of ``hidden`` is summed: 1, one chain over the vocabulary; 8, chains over eight
            segments of it, added by a balanced tree. The default is 8 with ``process_group``, otherwise 1. Groups of
            several ranks need 8; without a group 8 gives their bits.
        validate: check the values of ids, kept_ids, temperature and min_logit, and that targets are kept. This syncs
            with a GPU, with ``min_logit`` after the forward pass too, and is skipped under torch.compile and graph
            capture. Without the check, a row with an id out of range gives NaN, and so do the gradients that it
            contributes to. In a group, the first call of a kind (dtypes and options) also compares arguments, hidden
            states and ids with those of the other ranks, by one exchange: an error of one rank is then raised on all.
            ``"ranks"``, or ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, compares every call.
        backend: name of a backend, ``auto``, or None: the backend that ``use_backend`` or ``RL_KERNELS_BACKEND``
            forces, otherwise ``auto``.

    Returns:
        Log-probabilities ``[...]`` in FP32 (FP64 for FP64 inputs), or ``LogpStats`` of three such tensors.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        CanaryMismatch: this GPU gives other bits than those recorded for its architecture; checked at the first call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform; in backward, ``.grad`` of a
            weight with ``main_grad`` was not None and the pass added to it.
    """
    options = Options(
        *(temperature, min_logit, softcap, logit_scale, ignore_index, return_stats, join_tokens),
        *(memory, vocab_size, vocab_segments, validate, backend),
        kept_ids=kept_ids,
    )
    operands, call = agreed(hidden, lm_head_weight, target_ids, bias, process_group, options)
    results = (apply_of(LinearLogp, call.ready) if call.needs_gradient else forward)(*operands, call)
    if validate:
        check_targets(operands, call, results[0])
    return _finished(lm_head_weight, target_ids, call, results)


def linear_logp_known(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_stats: bool = False,
    **options: Unpack[Keywords],
) -> Known:
    """Return the statistics of ``linear_logp``, for ``linear_logp_from_known``; without gradients.

    Args:
        hidden: as in ``linear_logp``, as all arguments that follow.
        lm_head_weight: ``[V, D]``.
        target_ids: ``[...]``.
        bias: ``[V]``, or None.
        return_stats: also return logsumexp and entropy, for a later call with ``return_stats``.
        options: the other keyword arguments of ``linear_logp``.

    Returns:
        ``Known(logp, norm, logsumexp, entropy)``; the last two are None without ``return_stats``.

    Raises:
        ValueError: gradients are enabled and an operand requires one.
        TypeError, ValueError, BackendUnavailable, CanaryMismatch, RuntimeError: as in ``linear_logp``.
    """
    keywords: dict[str, Any] = {**options}
    group = keywords.pop("process_group", None)
    settings = Options(**keywords, return_stats=return_stats, return_known=True)
    operands, call = agreed(hidden, lm_head_weight, target_ids, bias, group, settings)
    logp, *stats, norm, _ = forward(*operands, call)
    if settings.validate:
        check_targets(operands, call, logp)
    shape = target_ids.shape
    return Known(logp.view(shape), norm.view(*shape, 2), *[value.view(shape) for value in stats])


def linear_logp_from_known(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    known: Known,
    bias: torch.Tensor | None = None,
    *,
    check_rows: int = 8,
    return_stats: bool = False,
    **options: Unpack[Keywords],
) -> torch.Tensor | LogpStats:
    """Return what ``linear_logp`` returns, without a forward pass; backward gives the same bits.

    Args:
        hidden: as in ``linear_logp``, as all arguments that follow.
        lm_head_weight: ``[V, D]``.
        target_ids: ``[...]``.
        known: what ``linear_logp_known`` returned for these hidden states, weights, ids and options, in the shape of
            target_ids. It is returned, copied. No logits are kept, whatever ``memory`` is.
        bias: ``[V]``, or None.
        check_rows: >= 0: with ``validate``, recompute this many rows and compare them bit for bit. Each call takes
            other rows, by a generator of its own.
        return_stats: as in ``linear_logp``; the earlier call must have had it too.
        options: the other keyword arguments of ``linear_logp``.

    Raises:
        BitsDiffer: a row that was recomputed differs from ``known``; the message names it, and by how many ULPs.
        TypeError, ValueError, BackendUnavailable, CanaryMismatch, RuntimeError: as in ``linear_logp``.
    """
    if known is None:
        raise TypeError("known: expected what linear_logp_known returns, got NoneType")
    keywords: dict[str, Any] = {**options}
    group = keywords.pop("process_group", None)
    settings = Options(**keywords, return_stats=return_stats, known=known, check_rows=check_rows)
    operands, call = agreed(hidden, lm_head_weight, target_ids, bias, group, settings)
    if settings.validate and not values_hidden(hidden):
        check_known(operands, call, check_rows)
    results = (apply_of(LinearLogp, call.ready) if call.needs_gradient else forward)(*operands, call)
    if settings.validate:
        check_targets(operands, call, results[0])
    return _finished(lm_head_weight, target_ids, call, results)


def _finished(
    lm_head_weight: torch.Tensor, target_ids: torch.Tensor, call: Call, results: tuple[torch.Tensor, ...]
) -> torch.Tensor | LogpStats:
    """Return the results in the shape of the ids; without a view, which costs host time, if that is theirs."""
    if call.needs_gradient and call.main_grad is not None:
        fold_grad_into_main_grad("lm_head_weight", lm_head_weight, results[0])
    if target_ids.ndim != 1:
        results = tuple([value.view(target_ids.shape) for value in results[: 3 if call.has_stats else 1]])
    return LogpStats(*results[:3]) if call.has_stats else results[0]
