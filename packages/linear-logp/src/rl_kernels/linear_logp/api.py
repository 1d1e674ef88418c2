"""The public function ``linear_logp``: validation, dispatch, autograd."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose
from rl_kernels.core.main_grad import gather
from rl_kernels.core.outputs import LogpStats
from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.torchlib import (
    autocast_linear,
    first_order,
    is_asked_for,
    no_lost_derivatives,
    scalar_or_rows,
    scalars,
)
from rl_kernels.linear_logp.op import OPERATOR, describe, ops


@overload
def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: Literal[False] = False,
    workspace_mib: int = 256,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor: ...


@overload
def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: Literal[True],
    workspace_mib: int = 256,
    validate: bool = True,
    backend: str | None = None,
) -> LogpStats: ...


@overload
def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: bool,
    workspace_mib: int = 256,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | LogpStats: ...


def linear_logp(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    return_stats: bool = False,
    workspace_mib: int = 256,
    validate: bool = True,
    backend: str | None = None,
) -> torch.Tensor | LogpStats:
    """Return the log-probability of each target: ``z[id] - logsumexp(z)``, without materialising the logits.

    ``z = x / temperature`` with ``x = logit_scale (hidden @ W^T + bias)``; with a softcap it is
    ``z = softcap tanh(x / softcap) / temperature``. With p = softmax(z), the entropy is ``-sum(p log p)``, in nats.

    At any time memory holds the logits of only one piece of the vocabulary for one block of rows. They are never
    rounded below FP32 (FP64 for FP64 inputs). A row's result and its row of the gradient of ``hidden`` depend on that
    row and the weights alone, bit for bit. The gradients of weight and bias are sums over tokens in a fixed order:
    they are repeatable, and appending ignored rows does not change them.

    If ``lm_head_weight.main_grad`` exists (FP32, with the shape and device of the weight), backward adds the weight's
    gradient to it in place, and nothing to ``.grad``. Micro-batches cut at multiples of 16 tokens then give the bits of
    the whole batch. A gradient that another op puts into ``.grad`` in the same pass, such as the embedding of a tied
    weight, is moved to ``main_grad`` at the end of the pass (eager only).

    Under ``torch.autocast`` hidden, weight and bias are cast as ``F.linear`` casts its operands. As there, autocast on
    a GPU with gradients off keeps the cast copy of a parameter until its outermost block ends.

    Args:
        hidden: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides; differentiable.
        lm_head_weight: ``[V, D]``, dtype and device of ``hidden``, any strides; differentiable.
        target_ids: ``[...]``, int64 or int32, each in ``[0, V)`` or equal to ``ignore_index``.
        bias: ``[V]``, dtype and device of ``hidden``, or None; differentiable. ``-inf`` masks an entry.
        temperature: a number > 0, or a floating-point tensor of no dims or ``[...]`` (one value per token) that does
            not require grad.
        softcap: >= 0; bound of the logits before the temperature (Gemma 2 uses 30), or 0 for none.
        logit_scale: > 0; multiplies the logits before the cap, as in Cohere models. For Granite give
            ``1 / logits_scaling``.
        ignore_index: positions with this id give 0 in every output and get zero gradient. Their hidden states have no
            effect and add nothing to the gradients of weight and bias.
        return_stats: return ``LogpStats(logp, logsumexp, entropy)``, all differentiable.
        workspace_mib: MiB, an integer >= 1: limit on the memory of backward besides the gradients. It includes the FP32
            buffer for the gradient of ``hidden`` and, with ``ignore_index``, a copy of ``hidden`` if the weight needs a
            gradient. If the limit is below these plus the smallest block that the backend works on, backward uses that
            much. It changes no bit.
        validate: check the values of ids and temperature. This syncs with a GPU, and is skipped under torch.compile and
            graph capture. Without the check, a row with an id out of range gives NaN, and so do the gradients that it
            contributes to.
        backend: name of a backend, ``auto``, or None: the backend that ``use_backend`` or ``RL_KERNELS_BACKEND``
            forces, otherwise ``auto``.

    Returns:
        Log-probabilities ``[...]`` in FP32 (FP64 for FP64 inputs), or ``LogpStats`` of three such tensors.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        BackendUnavailable: the requested backend cannot run this call.
        RuntimeError: forward-mode AD, or gradients through a ``torch.func`` transform; in backward, ``.grad`` of a
            weight with ``main_grad`` was not None and the pass added to it.
    """
    _validate_kinds(hidden, lm_head_weight, target_ids, bias)
    main_grad = getattr(lm_head_weight, "main_grad", None) if lm_head_weight.requires_grad else None
    hidden, weight, bias = autocast_linear(hidden, lm_head_weight, bias)
    _validate(hidden, weight, target_ids, bias, temperature, ignore_index, workspace_mib, backend, validate)
    dtype = compute_dtype(hidden.dtype)
    temperature, cap = _scaled(temperature, softcap, logit_scale, dtype)
    if main_grad is not None:
        check.main_grad("lm_head_weight.main_grad", main_grad, weight)
    no_lost_derivatives("linear_logp", hidden, weight, bias, temperature)
    chosen = choose(OPERATOR, describe(hidden, weight, target_ids, bias), backend)
    scale = scalar_or_rows(temperature, dtype)
    rows = hidden.flatten(0, -2) if hidden.ndim > 1 else hidden[None]
    arguments = (rows, weight, target_ids.reshape(-1), bias, scale, ignore_index, cap)
    differentiable = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if differentiable and torch.is_grad_enabled():
        results = _LinearLogp.apply(*arguments, main_grad, workspace_mib, return_stats, chosen.name)
        if main_grad is not None:
            gather("lm_head_weight", lm_head_weight, results[0])
    else:
        results = ops["forward_stats" if return_stats else "forward"](*arguments, chosen.name)

    logp = results[0].view(target_ids.shape)
    if not return_stats:
        return logp
    return LogpStats(logp, *(value.view(target_ids.shape) for value in results[1:3]))


def _validate_kinds(hidden: object, weight: object, target_ids: object, bias: object) -> None:
    check.tensor("hidden", hidden, check.FLOATS, least=1)
    check.tensor("lm_head_weight", weight, check.FLOATS, ndim=2)
    check.tensor("target_ids", target_ids, check.INTEGERS)
    if bias is not None:
        check.tensor("bias", bias, check.FLOATS, ndim=1)


def _validate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float | torch.Tensor,
    ignore_index: int | None,
    workspace_mib: int,
    backend: str | None,
    values: bool,
) -> None:
    vocab = weight.shape[0]
    if vocab == 0:
        raise ValueError(f"lm_head_weight: expected a vocabulary (first dim) of at least 1, got {tuple(weight.shape)}")
    check.shape("lm_head_weight", weight, (vocab, hidden.shape[-1]), "V, and the last dim of hidden")
    check.token_ids("target_ids", target_ids, hidden.shape[:-1], "the leading dims of hidden")
    if bias is not None:
        check.shape("bias", bias, (vocab,), "the first dim of lm_head_weight")
    check.same_device(hidden=hidden, lm_head_weight=weight, target_ids=target_ids, bias=bias)
    check.same_dtype(hidden=hidden, lm_head_weight=weight, bias=bias)
    check.ignore_index(ignore_index, target_ids)
    check.integer("workspace_mib", workspace_mib, least=1)
    check.backend_name(backend)
    check.temperature(temperature, target_ids.shape, hidden.device, compute_dtype(hidden.dtype), values=values)
    if values:
        check.ids_in_range("target_ids", target_ids, vocab, ignore_index)


def _scaled(
    temperature: float | torch.Tensor, softcap: float, logit_scale: float, dtype: torch.dtype
) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """Return the temperature and the numbers of ``Cap``, or without a cap temperature / logit_scale and None."""
    check.number("softcap", softcap, least=0, dtype=dtype)
    check.number("logit_scale", logit_scale, above=0, dtype=dtype)
    if softcap > 0:
        rate = logit_scale / softcap
        check.number("softcap", softcap, above=0, dtype=dtype)
        check.number("logit_scale / softcap", rate, above=0, dtype=dtype)
        return temperature, scalars(softcap, rate)
    if logit_scale == 1:
        return temperature, None
    if isinstance(temperature, torch.Tensor):
        return temperature.to(dtype) / logit_scale, None
    check.number("temperature / logit_scale", temperature / logit_scale, above=0, dtype=dtype)
    return temperature / logit_scale, None


class _LinearLogp(torch.autograd.Function):
    """Saves the inputs and norm, and entropy with ``return_stats``; never the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        bias: torch.Tensor | None,
        temperature: torch.Tensor,
        ignore_index: int | None,
        cap: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        workspace_mib: int,
        return_stats: bool,
        backend: str,
    ) -> tuple[torch.Tensor, ...]:
        op = ops["forward_stats" if return_stats else "forward"]
        results = op(hidden, weight, target_ids, bias, temperature, ignore_index, cap, backend)
        ctx.save_for_backward(hidden, weight, target_ids, bias, temperature, cap, results[-1], *results[2:3])
        ctx.set_materialize_grads(False)
        # Not a saved tensor: other backward passes may add to the buffer before this one runs.
        ctx.main_grad = main_grad
        ctx.ignore_index, ctx.workspace_mib, ctx.backend = ignore_index, workspace_mib, backend
        return results[:3] if return_stats else results[:1]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target_ids, bias, temperature, cap, norm, *entropy = ctx.saved_tensors
        inputs = (hidden, weight, target_ids, bias, temperature, ctx.ignore_index, cap)
        saved = (norm, entropy[0] if entropy else None, *upstream, *[None] * (3 - len(upstream)))
        needed = [ctx.needs_input_grad[number] and is_asked_for(ctx, number) for number in (0, 1, 3)]
        arguments = (*inputs, *saved, ctx.workspace_mib, needed)
        if needed[1] and ctx.main_grad is not None:
            dhidden, dbias = first_order(ops["backward_main_grad"], *arguments, ctx.main_grad, ctx.backend)
            dweight = None
        else:
            dhidden, dweight, dbias = first_order(ops["backward"], *arguments, ctx.backend)
        found = [value if wanted else None for value, wanted in zip((dhidden, dweight, dbias), needed, strict=True)]
        return found[0], found[1], None, found[2], *[None] * 7
