"""What a model of transformers needs beside its modules: an attention of ours, under a name of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rl_kernels.models.ops import attention
from rl_kernels.models.swap import Undo

NAME = "rl_kernels"
"""The attention implementation, as ``config._attn_implementation`` knows it."""


class Swapped(str):
    """``NAME`` as a config has it while it is swapped; a deep copy remembers what it had, a pickle holds that alone."""

    original: str

    def __deepcopy__(self, memo: Any) -> Swapped:
        return self

    def __reduce__(self) -> Any:
        return str, (self.original,)


def pretrained(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are transformers' ``PreTrainedModel``; imports it for none other."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def register() -> None:
    """Register the attention, and the mask that it wants: always there, one bool for each query and key."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def why_not(module: Any) -> str | None:
    """Say why a ``PreTrainedModel`` keeps its own attention, or return None."""
    can = getattr(type(module), "_can_set_attn_implementation", None)
    if can is None or not can():
        return "its attention does not go through transformers' AttentionInterface"
    return None


def configs(model: Any) -> Iterator[Any]:
    """Yield the configs of a model and of its parts, the outer ones first."""
    waiting, met = [model.config], set()
    while waiting:
        config = waiting.pop(0)
        if id(config) in met:
            continue
        met.add(id(config))
        yield config
        waiting += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]


def attention_swap(config: Any) -> Undo:
    """Swap a config's attention implementation for ours; return how to undo it."""
    found = config._attn_implementation
    swapped = Swapped(NAME)
    # A deep copy of a config that was swapped is so too. A model made under our name never had another one.
    swapped.original = getattr(found, "original", "sdpa" if found == NAME else found)
    # The public setter would set the configs inside too, each of which is swapped by itself.
    config._attn_implementation_internal = swapped

    def undo(config: Any) -> None:
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = swapped.original

    return undo


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention ``[B, T, H, D]`` and no weights: the signature is that of transformers' AttentionInterface.

    A sliding window comes in the mask. ``softcap`` is kept; dropout, sinks and position biases raise ``ValueError``.
    """
    if dropout:
        raise ValueError(f"attention_dropout: expected 0 under invariant(), got {dropout}: its draws follow the batch")
    for name in ("s_aux", "position_bias", "cache"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: the attention of invariant() has none; leave this model's attention alone")
    visible = _visible(module, query, key, attention_mask, options.get("is_causal"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention(query, key, value, visible, scale, options.get("softcap") or 0.0), None


def _visible(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool | None
) -> torch.Tensor:
    """Return ``[B, T, S]``: which keys a query sees."""
    shape = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        every = torch.ones(shape[1:], dtype=torch.bool, device=query.device)
        is_causal = getattr(module, "is_causal", False) if causal is None else causal
        return (every.tril(shape[2] - shape[1]) if is_causal else every).expand(shape)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.dtype != torch.bool:
        found = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"attention_mask: expected a bool mask [B, 1, T, S], the same for all heads, got {found}")
    return mask[:, 0, :, : shape[2]].expand(shape)
