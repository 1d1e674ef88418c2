"""What a model of transformers needs beside its modules: an attention of ours, under a name of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils._pytree import register_constant

from rl_kernels.models.attention import attention_forward, attention_mask
from rl_kernels.models.swap import Undo

NAME = "rl_kernels_flash"
"""The attention implementation, as ``config._attn_implementation`` knows it.

By "flash" in a name transformers knows an attention that takes packed sequences by their lengths and needs no mask made
of elements. Its continuous batching runs no others beside its own, or puts FlashAttention in their place.
"""


class Swapped(str):
    """``name()`` as a config has it while swapped; a deep copy remembers what it had, a pickle holds that alone."""

    original: str

    def __deepcopy__(self, memo: Any) -> Swapped:
        return self

    def __reduce__(self) -> Any:
        return str, (self.original,)


# Before 2.13, torch.compile takes no other subclass of str as the key of a dict, which transformers makes of it.
register_constant(Swapped)


def pretrained(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are transformers' ``PreTrainedModel``; imports it for none other."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def name() -> str:
    """Return ``NAME`` as the installed transformers wants it: there were names apart for continuous batching."""
    from transformers import AttentionInterface

    return f"paged|{NAME}" if "paged|sdpa" in AttentionInterface().valid_keys() else NAME


def register() -> None:
    """Register the attention, and the mask that it wants."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name(), attention_forward)
    AttentionMaskInterface.register(name(), attention_mask)


def why_not(module: Any) -> str | None:
    """Say why a ``PreTrainedModel`` keeps its own attention, or return None."""
    can = getattr(type(module), "_can_set_attn_implementation", None)
    if can is None or not can():
        return "its attention does not go through transformers' AttentionInterface"
    if not getattr(module, "_supports_flash_attn", False):
        return "its attention is none that flash attention computes"
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
    swapped = Swapped(name())
    # A deep copy of a config that was swapped is so too. A model made under our name never had another one.
    swapped.original = getattr(found, "original", "sdpa" if found == swapped else found)
    # The public setter would set the configs inside too, each of which is swapped by itself.
    config._attn_implementation_internal = swapped

    def undo(config: Any) -> None:
        if config._attn_implementation == swapped:
            config._attn_implementation_internal = swapped.original

    return undo
