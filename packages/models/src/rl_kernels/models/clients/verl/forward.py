"""The forward of a causal language model for verl's fused kernels: log-probabilities instead of logits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.outputs import LogpStats
from rl_kernels.models.head import head_logp
from rl_kernels.models.logits import logit_options

BACKEND = "_verl_fused_kernels_backend"
"""Attribute in which verl keeps a model's fused backend; two backends share a forward."""
MEMORY = "RL_KERNELS_MEMORY"
"""Environment variable of the workers: the ``memory`` of ``linear_logp``, ``lean`` or ``fast``."""


def forward_of(original: Callable[..., Any], output: type[Any]) -> Callable[..., Any]:
    """Return the forward that replaces verl's ``forward_with_torch_backend``.

    Args:
        original: verl's forward, which still serves the backend ``liger``.
        output: the class of its result, verl's ``CausalLMOutputForPPO``.
    """

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        *args: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        temperature: float | torch.Tensor = 1.0,
        return_dict: bool | None = None,
        **arguments: Any,
    ) -> Any:
        if getattr(self, BACKEND, "torch") != "torch":
            options = {"labels": labels, "shift_labels": shift_labels, "temperature": temperature}
            return original(self, input_ids, *args, **options, return_dict=return_dict, **arguments)
        if args:
            raise TypeError("forward: expected all but input_ids by name, as verl's engines call it")
        if not return_dict:
            raise ValueError("return_dict: expected True, a tuple has no place for log-probabilities")
        labels = shift_labels if shift_labels is not None else _next_tokens(labels, input_ids)
        arguments.pop("logits_to_keep", None)
        result = self.base_model(input_ids=input_ids, return_dict=True, **arguments)
        hidden = result.last_hidden_state
        scored = scores(self, hidden, labels, temperature=_per_label(temperature, labels), return_stats=True)
        assert isinstance(scored, LogpStats)
        optional = {name: getattr(result, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
        return output(log_probs=scored.logp, entropy=scored.entropy, **optional)

    forward.replaced = original  # type: ignore[attr-defined]
    return forward


def scores(model: Any, hidden: torch.Tensor, ids: torch.Tensor, **options: Any) -> Any:
    """Return ``head_logp`` for the head of a model, with the model's soft cap and scale of logits.

    hidden is ``[..., D]`` and ids ``[...]``; options are passed to ``linear_logp``, with the memory of ``MEMORY``.
    """
    head = model.get_output_embeddings()
    options = {**logit_options(model), **options, "memory": os.environ.get(MEMORY, "lean")}
    return head_logp(head, hidden, ids, validate=False, **options)


def is_ours(model: Any) -> bool:
    """Say whether a model of transformers uses our forward: verl patched it for the backend ``torch``."""
    return hasattr(type(model).forward, "replaced") and getattr(model, BACKEND, "torch") == "torch"


def _next_tokens(labels: torch.Tensor | None, ids: torch.Tensor | None) -> torch.Tensor:
    """Return the token after each token; the last token's is the first token, whose score is not read."""
    tokens = ids if labels is None else labels
    if tokens is None:
        raise ValueError("input_ids: expected ids or labels, neither was given")
    return tokens.roll(-1, -1)


def _per_label(temperature: float | torch.Tensor, labels: torch.Tensor) -> float | torch.Tensor:
    """Return the temperature as a number, or expanded to one value per label."""
    if not isinstance(temperature, torch.Tensor) or not temperature.ndim:
        return float(temperature)
    if temperature.ndim < labels.ndim:
        temperature = temperature[:, None]
    return temperature.expand(labels.shape)
