"""Our version of TRL's fused head: ``model(..., labels=..., fused_lm_head=True)`` scores by ``linear_logp``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers.utils import ModelOutput

from rl_kernels.core.outputs import LogpStats
from rl_kernels.linear_logp import linear_logp
from rl_kernels.models.head import head_logp
from rl_kernels.models.logits import logit_options

IGNORED = -100
"""The label of a position that is not scored."""
MIN_LOGIT = "min_logit"
"""Argument of the fused head: ``min_logit[B, K]`` of the last K labels, as int32 bits: wrappers cast FP32 inputs."""
KEPT_IDS = "kept_ids"
"""Argument of the fused head: ``kept_ids[B, K, n]`` of the last K labels."""
SCORED = "_rl_kernels_scored"
"""Attribute of a model: its ``Head``, and the forward that TRL's fused head replaced."""
REPLACED = "original_forward"
"""TRL's name of the forward that its fused head replaced, in the closure of that head."""


@dataclass
class Scores(ModelOutput):
    """The results that TRL reads from a model with a fused head; zeros where nothing was scored.

    Attributes:
        log_probs: ``[B, T - 1]``, FP32: log-probability of each label given the tokens before it.
        entropy: ``[B, T - 1]``, FP32: entropy of each label's distribution; None if not requested.
        aux_loss: always None, because models with one are refused.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class Head:
    """Scores labels through the head of a model of transformers, as TRL does, by ``linear_logp``.

    Args:
        model: a causal language model, without wrappers.
        temperature: divides the logits.
        in_fp32: compute the product in FP32, whatever the dtype of the hidden states.
        entropy: compute the entropy too.
        memory: as in ``linear_logp``.
    """

    def __init__(self, model: Any, temperature: float, *, in_fp32: bool, entropy: bool, memory: Any = "lean") -> None:
        self._model, self._in_fp32 = model, in_fp32
        self._options: dict[str, Any] = {
            "temperature": temperature,
            **logit_options(model),
            "return_stats": entropy,
            "memory": memory,
            "validate": False,
        }

    @property
    def module(self) -> Any:
        """The head, which wrappers may have replaced since the last call."""
        return self._model.get_output_embeddings()

    def scores(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        min_logit: torch.Tensor | None = None,
        kept_ids: torch.Tensor | None = None,
    ) -> Scores:
        """Score all labels ``[B, T]`` but ``IGNORED`` in one call, given hidden states ``[B, T, D]``.

        Args:
            hidden: the last hidden states.
            labels: the tokens after them.
            min_logit: ``[B, K]``, FP32, of the last K labels: smaller logits are left out, as in ``linear_logp``.
            kept_ids: ``[B, K, n]``, of the last K labels: other ids are left out. A label whose ids are all -1, as a
                token of a tool has, is kept alone: its log-probability is 0, without a gradient.

        Raises:
            TypeError: ``head_logp`` does not take the head.
        """
        labels = labels.to(hidden.device)
        is_scored = labels != IGNORED
        if min_logit is not None:
            whole = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=hidden.device)
            whole[:, -min_logit.shape[1] :] = min_logit
            min_logit = whole[is_scored]
        if kept_ids is not None:
            shape = (*labels.shape, kept_ids.shape[-1])
            ids = torch.full(shape, -1, dtype=torch.int64, device=hidden.device)
            ids[:, -kept_ids.shape[1] :] = kept_ids
            ids[..., 0] = torch.where((ids < 0).all(-1), labels, ids[..., 0])
            kept_ids = ids[is_scored]
        result = self._score_rows(hidden[is_scored], labels[is_scored], min_logit, kept_ids)

        def spread(values: torch.Tensor) -> torch.Tensor:
            # Stays connected to the model even if no position has a label.
            return values.new_zeros(is_scored.shape).masked_scatter(is_scored, values)

        if isinstance(result, LogpStats):
            return Scores(spread(result.logp), spread(result.entropy))
        return Scores(spread(result))

    def logps(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        min_logit: torch.Tensor | None = None,
        kept_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the log-probabilities ``[N]`` of tokens ``[N]`` given the hidden states ``[N, D]`` before them.

        ``min_logit[N]`` and ``kept_ids[N, n]`` are those of ``linear_logp``.
        """
        result = self._score_rows(rows, ids, min_logit, kept_ids)
        return result.logp if isinstance(result, LogpStats) else result

    def _score_rows(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        min_logit: torch.Tensor | None,
        kept_ids: torch.Tensor | None,
    ) -> torch.Tensor | LogpStats:
        head = self.module
        # In a model split over devices, tokens are on the device of its embeddings.
        device = getattr(head, "weight", rows).device
        ids = ids.to(device)
        options = self._options
        for name, value in ((MIN_LOGIT, min_logit), (KEPT_IDS, kept_ids)):
            if value is not None:
                options = {**options, name: value.to(device)}
        if rows.device != device:
            result = self._score_rows(rows.to(device), ids, min_logit, kept_ids)
            if isinstance(result, LogpStats):
                return LogpStats(*(value.to(rows.device) for value in result))
            return result.to(rows.device)
        if not self._in_fp32:
            return head_logp(head, rows, ids, **options)
        # In this mode TRL replaces the forward of the head by a product in FP32.
        with torch.autocast(rows.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            return linear_logp(rows.float(), head.weight.float(), ids, bias, **options)


def score_with(model: Any, head: Head, *, places: bool = False, around: Callable[[], Any] | None = None) -> None:
    """Replace TRL's fused head on a model of transformers by ``head``.

    Calls without ``fused_lm_head=True`` do not change, so ``generate`` stays the same. A deep copy of the model scores
    through its own head and computes with its own weights.

    Args:
        model: a causal language model; wrappers around it (PEFT, DDP, FSDP) call its forward and keep their hooks.
        head: its head.
        places: use the positions of ``generate`` for tokens after left padding; TRL counts the padding, which rounds
            differently.
        around: accelerate's autocast, in which the forward of a prepared model runs.
    """
    original, is_prepared = _original_forward(model)

    # Keeps the signature of the class, which ``generate`` inspects.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **arguments: Any) -> Any:
        # Read from the object that is called: it may be a deep copy, whose attributes are its own.
        head, original = getattr(self, SCORED)
        if not fused_lm_head:
            return original(*args, **arguments)
        labels, shift_labels = arguments.pop("labels", None), arguments.pop("shift_labels", None)
        arguments.pop("num_items_in_batch", None)
        bits, kept_ids = arguments.pop(MIN_LOGIT, None), arguments.pop(KEPT_IDS, None)
        attention = arguments.get("attention_mask")
        if places and attention is not None and arguments.get("position_ids") is None:
            arguments["position_ids"] = (attention.long().cumsum(-1) - 1).clamp(min=0)
        hidden = self.base_model(*args, **{**arguments, "use_cache": False}).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        return head.scores(hidden, shift_labels, None if bits is None else bits.view(torch.float32), kept_ids)

    setattr(model, SCORED, (head, original))
    model.forward = MethodType(forward, model)
    if is_prepared and around is not None:
        # As in accelerate: otherwise a model with FP32 weights would no longer run in mixed precision.
        model._original_forward = model.forward
        model.forward = MethodType(convert_outputs_to_fp32(around()(forward)), model)


def _original_forward(model: Any) -> tuple[Callable[..., Any], bool]:
    """Return the forward that TRL's fused head replaced, and whether accelerate wrapped that head in its autocast.

    TRL's function holds this forward, bound to the model, so that a copy of the model would call the original.
    """
    for forward in (model.forward, vars(model).get("_original_forward")):
        function: Any = getattr(forward, "__func__", None)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if REPLACED in names:
            return function.__closure__[names.index(REPLACED)].cell_contents, forward is not model.forward
    return model.forward, False
