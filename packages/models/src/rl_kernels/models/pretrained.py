"""Register our attention with transformers, and swap it into a model's configs; frequencies of rotary embeddings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_constant

from rl_kernels.models.attention import attention_forward, attention_mask
from rl_kernels.models.swap import Undo

NAME = "rl_kernels_flash"
"""Name of the attention implementation in ``config._attn_implementation``.

transformers takes "flash" in a name to mean that an attention takes packed sequences by their lengths and needs no mask
of elements. Continuous batching runs only such attentions and its own, and replaces other ones by FlashAttention.
"""


class Swapped(str):
    """``name()`` in a swapped config; a deep copy keeps the original name too, a pickle holds only that."""

    original: str

    def __deepcopy__(self, memo: Any) -> Swapped:
        return self

    def __reduce__(self) -> Any:
        return str, (self.original,)


# Before 2.13, torch.compile accepts only a registered subclass of str as a dict key; transformers uses it as one.
register_constant(Swapped)


def is_pretrained(module: nn.Module) -> bool:
    """Say whether a module is a ``PreTrainedModel``; never the first to import transformers."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def name() -> str:
    """Return ``NAME`` in the form of the installed transformers; older ones need a prefix for continuous batching."""
    from transformers import AttentionInterface

    return f"paged|{NAME}" if "paged|sdpa" in AttentionInterface().valid_keys() else NAME


def register() -> None:
    """Register the attention and its mask with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name(), attention_forward)
    AttentionMaskInterface.register(name(), attention_mask)


def why_not(module: Any) -> str | None:
    """Return the reason why a ``PreTrainedModel`` keeps its own attention, or None."""
    can = getattr(type(module), "_can_set_attn_implementation", None)
    if can is None or not can():
        return "its attention does not go through transformers' AttentionInterface"
    if not getattr(module, "_supports_flash_attn", False):
        return "flash attention does not support its attention"
    return None


def configs(model: Any) -> Iterator[Any]:
    """Yield the configs of a model and of its parts, the outer ones first."""
    queue, visited = [model.config], set()
    while queue:
        config = queue.pop(0)
        if id(config) in visited:
            continue
        visited.add(id(config))
        yield config
        queue += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]


def kept_config(module: Any) -> Any:
    """Return the config of transformers that a layer stores, or None: a copied layer stores a copy of the config."""
    config = vars(module).get("config")
    return config if hasattr(config, "_attn_implementation") else None


def attention_swap(config: Any) -> Undo:
    """Swap a config's attention implementation for ours; return a function that undoes it."""
    current = config._attn_implementation
    swapped = Swapped(name())
    # A deep copy of a swapped config is swapped too. A model made under our name never had another name.
    swapped.original = getattr(current, "original", "sdpa" if current == swapped else current)
    # The public setter would also set the inner configs, which are swapped one by one.
    config._attn_implementation_internal = swapped

    def undo(config: Any) -> None:
        if config._attn_implementation == swapped:
            config._attn_implementation_internal = swapped.original

    return undo


def is_rotary(module: nn.Module) -> bool:
    """Say whether a module is a rotary embedding of transformers, which keeps its config and its frequencies."""
    return "RotaryEmbedding" in type(module).__name__ and kept_config(module) is not None


def frequencies_swap(module: Any) -> Undo:
    """Set the frequencies of a rotary embedding to those that its class computes on the CPU.

    A GPU computes powers with other last bits, so the bits of a model would depend on where it was made. Frequencies
    that differ by more than that, because they were cast or scaled, stay.
    """
    kept: dict[str, torch.Tensor] = {}
    try:
        with torch.device("cpu"):
            buffers = dict(type(module)(module.config).named_buffers())
    except TypeError:  # its class takes more than a config
        buffers = {}
    for buffer_name, value in buffers.items():
        own = getattr(module, buffer_name, None)
        if own is None or own.is_meta or (own.shape, own.dtype) != (value.shape, torch.float32):
            continue
        value = value.to(own.device)
        if torch.allclose(own, value, rtol=1e-6, atol=0.0) and not torch.equal(own, value):
            kept[buffer_name] = own.clone()
            own.copy_(value)

    def undo(module: Any) -> None:
        for buffer_name, value in kept.items():
            getattr(module, buffer_name).copy_(value)

    return undo
