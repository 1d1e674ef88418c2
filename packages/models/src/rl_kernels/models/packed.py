"""Rows of packed sequences: found once per forward pass, by ``position_ids`` that do not go up by one.

transformers looks at positions only in calls without a mask and without a cache, and a model keeps a cache unless told
otherwise; some models do not pass the lengths of sequences on to their attention. So a hook in front of the model looks
at the positions and lengths of every call, and gives our attention its own mask of packed sequences. Positions that the
model makes itself are not looked at: most calls do not wait for the GPU.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rl_kernels.core.torchlib import values_hidden
from rl_kernels.models.attention import PACKED
from rl_kernels.models.swap import Undo

TEXT = 4
"""First dim of the positions of a model of images and text whose first row holds the positions of the text."""
NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The arguments of a call that give its sequences by their lengths, as ``DataCollatorWithFlattening`` makes them."""


class _Hook:
    """Pre-hook of a ``PreTrainedModel``: puts the mask of its packed sequences into a call, and their lengths."""

    def __init__(self, kind: type[nn.Module]) -> None:
        # Read here, because torch.compile cannot trace it.
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
        self.names = tuple(one.name for one in parameters)
        self.takes_lengths = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        found = _lengths(given)
        if found is None:
            return None
        bounds, longest = found
        if "use_cache" in self.names:
            # The keys of several sequences in one row cannot be continued.
            given["use_cache"] = False
        given["attention_mask"] = bounds.expand(PACKED, 1, longest, -1)
        if self.takes_lengths:
            given |= dict(zip(NAMES, (bounds, bounds, longest, longest), strict=True))
        return (), given

    def __reduce__(self) -> Any:
        # A pickle holds a function that does nothing, so that it can be read without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self


def _lengths(given: Mapping[str, Any]) -> tuple[torch.Tensor, int] | None:
    """Return cu_seqlens of the packed sequences of a call and the longest length; None if each row is a sequence."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if given.get(NAMES[0]) is not None:
        # With a cache, as in continuous batching, queries and keys differ in length: the attention sees to that.
        bounds, longest = given[NAMES[0]], given.get(NAMES[2])
        plain = all(given.get(name) is None for name in ("cache", "past_key_values"))
        is_new = mask is None or mask.ndim == 2
        return (bounds, longest) if plain and is_new and isinstance(longest, int) else None
    if positions is None or positions.shape[-1] < 2 or not (mask is None or getattr(mask, "ndim", None) == 2):
        return None
    if positions.ndim == 3 and len(positions) == TEXT:
        positions = positions[0]
    if positions.ndim != 2:
        return None
    inputs = (given.get(name) for name in ("input_ids", "inputs_embeds"))
    batch = next((len(value) for value in inputs if value is not None), len(positions))
    found = sequences(positions.expand(batch, -1), mask)
    if found is None:
        return None
    if given.get("past_key_values") is not None:
        raise ValueError("position_ids: expected one sequence per row with past_key_values, which mix them")
    return found, int(found.diff().max())


def sequences(positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return cu_seqlens of the sequences in the rows of a batch, one row after the other; None if no row has several.

    A sequence ends where the next position is not one more. Padding in such a batch is a sequence of its own.

    Args:
        positions: ``[B, T]``.
        mask: ``[B, S]``, S >= T: 0 for padding; the last T columns are those of the tokens.
    """
    ends = positions.diff(dim=1) != 1
    real = None if mask is None else mask[:, -positions.shape[1] :].to(positions.device, torch.bool)
    if real is not None:
        ends = ends & real[:, 1:] & real[:, :-1]
    if values_hidden(positions):
        message = "position_ids: expected one sequence per row here, or cu_seq_lens_q: their values cannot be read"
        torch._assert_async(~ends.any(), message)
        return None
    if not ends.any():
        return None
    if real is not None:
        ends = ends | (real[:, 1:] != real[:, :-1])
    begins = nn.functional.pad(ends, (1, 0), value=True).flatten().nonzero().flatten()
    return torch.cat((begins, begins.new_full((1,), positions.numel()))).int()


def hook_swap(module: nn.Module) -> Undo:
    """Put the hook in front of a model that takes positions and a mask; return how to undo it."""
    # A copy of a model has its hook already.
    _unhook(module)
    hook = _Hook(type(module))
    if {"position_ids", "attention_mask"} <= set(hook.names):
        module.register_forward_pre_hook(hook, with_kwargs=True)
    return _unhook


def _unhook(module: nn.Module) -> None:
    for number in [number for number, hook in module._forward_pre_hooks.items() if isinstance(hook, _Hook)]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)
