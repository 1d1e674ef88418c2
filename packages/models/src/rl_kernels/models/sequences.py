"""``sequence_logp``: log-probabilities of whole sequences, computed equally after a rollout and in the update."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from rl_kernels.core.outputs import LogpStats
from rl_kernels.models.head import copied, head_logp, is_cut
from rl_kernels.models.logits import check_logits, logit_options
from rl_kernels.models.pretrained import is_pretrained
from rl_kernels.models.swap import HOOK, WITHIN_HOOK, replaced

IGNORED = -100
"""Target of a position that is not scored."""
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose logits were compared with their scores."""


def sequence_logp(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | LogpStats:
    """Return the log-probability of each token after the first, by ``linear_logp`` on the model's hidden states.

    Score a rollout by it, under ``torch.no_grad()``, and score the update by it. Under ``invariant(model)`` a token has
    the same bits on both sides, in any batch, padding, packing or micro-batch. The logits of ``generate`` do not serve:
    in BF16 and FP16 they are rounded, and their log-probabilities differ from those of the update.

    Args:
        model: a causal language model of transformers, under ``invariant`` or not; also with adapters of PEFT, cut by
            ``parallelize``, wrapped by DDP or FSDP2, or split by accelerate.
        input_ids: ``[B, T]``: prompts and completions, such as ``generate`` returns.
        attention_mask: ``[B, T]``, 0 for padding on the left or right; None is no padding.
        position_ids: ``[B, T]``. By default they count the tokens that are no padding, as ``generate`` does. For
            sequences packed in a row, give positions that restart, and no mask.
        options: options of ``linear_logp``, such as ``temperature``, ``return_stats``, and ``memory="fast"``, which
            keeps logits for backward. The soft cap and the scale of the model's logits are set from its config.

    Returns:
        ``[B, T - 1]``, FP32: log-probabilities of ``input_ids[:, 1:]``, 0 where a token or the token before it is
        padding; or ``LogpStats`` with ``return_stats``. In a packed row the first token of a sequence is scored after
        the last token of the sequence before: mask it.

    Raises:
        TypeError: ``model`` is no such model; its logits do not follow from its last hidden states and its head
            (compared once for each model); or ``head_logp`` does not take its head.
        ValueError: shapes differ, PEFT put a learned prompt before the tokens, or accelerate's autocast is not active.
    """
    base = _base_model(model)
    if "ignore_index" in options:
        raise ValueError("ignore_index: padding is ignored by attention_mask; mask other tokens in the result")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids: expected [B, T] and not empty, got shape {tuple(input_ids.shape)}")
    for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if value is not None and value.shape != input_ids.shape:
            expected = f"the shape of input_ids, {tuple(input_ids.shape)}"
            raise ValueError(f"{name}: expected {expected}, got {tuple(value.shape)}")
    if "_original_forward" in vars(base) and not torch.is_autocast_enabled(input_ids.device.type):
        raise ValueError("model: accelerate runs it in mixed precision; call this within accelerator.autocast()")
    targets, inputs = input_ids[:, 1:], {"input_ids": input_ids, "position_ids": position_ids}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
        if position_ids is None:
            inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        is_token = attention_mask.bool()
        targets = targets.masked_fill(~(is_token[:, 1:] & is_token[:, :-1]), IGNORED)
    # The compiler would lose the replaced forward at a break of its graph; a compiled model stays compiled.
    scored = torch.compiler.disable(_score)
    return scored(model, base, inputs, targets, {"ignore_index": IGNORED, **logit_options(base), **options})


def _base_model(model: Any) -> Any:
    """Return the model of transformers within the wrappers of DDP and PEFT."""
    base = model
    while isinstance(base, nn.parallel.DistributedDataParallel):
        base = base.module
    if getattr(getattr(base, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("model: expected no learned prompt, which stands before the tokens")
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    if not is_pretrained(base):
        # Adapters of several types in one model, or a PEFT tuner without its model.
        base = getattr(getattr(base, "base_model", base), "model", base)
    config = getattr(base, "config", None)
    if not hasattr(base, "get_output_embeddings") or base.get_output_embeddings() is None or config is None:
        raise TypeError(f"model: expected a causal language model of transformers, got {type(base).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise TypeError(f"model: expected a decoder alone, {type(base).__name__} has an encoder")
    return base


def _score(
    model: nn.Module, base: Any, inputs: dict[str, Any], targets: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor | LogpStats:
    def score(hidden: torch.Tensor, ids: torch.Tensor, **options: Any) -> Any:
        return head_logp(base.get_output_embeddings(), hidden, ids, **options)

    # Not for a cut head: gathering its logits is a collective, which ranks without rows of it would not join.
    if base not in _checked and not is_cut(base.get_output_embeddings()):
        check_logits(base, lambda hidden, ids: score(hidden, ids, **logit_options(base)))
        _checked.add(base)

    def forward(**received: Any) -> Any:
        # PEFT adds options, and accelerate moves the tensors.
        received_inputs = {name: received[name] for name in inputs}
        hidden = base.base_model(**received_inputs, use_cache=False, return_dict=True).last_hidden_state
        return copied(score(hidden[:, :-1], targets, **options))

    # Call the whole model, because hooks of wrappers gather weights, move inputs and select adapters.
    with replaced(base, WITHIN_HOOK if HOOK in vars(base) else "forward", forward):
        result: torch.Tensor | LogpStats = model(**inputs)
    return result
