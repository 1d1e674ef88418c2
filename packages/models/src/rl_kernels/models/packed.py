"""A forward pre-hook on a transformers model: finds packed sequences, new layers, and attention that was replaced.

Packed sequences are found once per forward pass, by ``position_ids`` that do not go up by one.

transformers reads positions only in calls without a mask and without a cache, and a model keeps a cache by default;
some models do not pass the lengths of sequences on to their attention. So a hook in front of the model reads the
positions and lengths of every call, and passes our attention its own mask of packed sequences. Positions that the
model makes itself are not read: most calls do not wait for the GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.models import pretrained
from rl_kernels.models.attention import PACKED
from rl_kernels.models.marks import MARKS, marks_of
from rl_kernels.models.swap import Undo

OnNewLayer = Callable[[nn.Module, str, nn.Module], None]
"""Takes a module, and the name and the module of a child that was added to it."""
TEXT = 4
"""First dim of the positions of a model of images and text whose first row holds the positions of the text."""
NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of a call that hold the lengths of its packed sequences, as ``DataCollatorWithFlattening`` makes them."""


class _Hook:
    """Pre-hook of a ``PreTrainedModel``: adds the mask and the lengths of packed sequences to a call."""

    def __init__(self, module: nn.Module, on_new_layer: OnNewLayer) -> None:
        # Read here, because torch.compile cannot trace it.
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self.names = tuple(parameter.name for parameter in parameters)
        self.takes_sequences = {"position_ids", "attention_mask"} <= set(self.names)
        self.takes_lengths = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        self.on_new_layer = on_new_layer
        self.attention = pretrained.name() if pretrained.why_not(module) is None else None

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        if not torch.compiler.is_compiling():
            self._swap_new_layers(module)
        if self.attention is not None and module.config._attn_implementation != self.attention:
            self._report_other_attention(module)
            return None
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        packed = _packed_lengths(arguments) if self.takes_sequences else None
        if packed is None:
            return None
        if self.attention is None:
            _refuse_mixing(arguments)
            return None
        bounds, longest = packed
        if "use_cache" in self.names or self.takes_lengths:
            # A cache with several sequences in one row cannot be continued.
            arguments["use_cache"] = False
        arguments["attention_mask"] = bounds.expand(PACKED, 1, longest, -1)
        if self.takes_lengths:
            arguments |= dict(zip(NAMES, (bounds, bounds, longest, longest), strict=True))
        return (), arguments

    def _swap_new_layers(self, module: nn.Module) -> None:
        """Swap new layers whose registration PyTorch did not report, as in ``nn.ModuleList.insert``."""
        for layers in module._modules.values():
            if isinstance(layers, nn.ModuleList):
                for name, layer in layers._modules.items():
                    if MARKS not in vars(layer):
                        self.on_new_layer(layers, name, layer)

    def _report_other_attention(self, module: Any) -> None:
        """Raise under ``strict``, or warn, that the config has another attention."""
        message = (
            f"config: expected the attention of invariant(), {self.attention}, got "
            f"{module.config._attn_implementation}, whose bits may depend on the batch; call undo() before you set it"
        )
        if any(mark.strict for mark in marks_of(module)):
            raise ValueError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    def __reduce__(self) -> Any:
        # A pickle holds a function that does nothing, so that it can be read without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self


def _refuse_mixing(arguments: Mapping[str, Any]) -> None:
    """Raise if a model with its own attention would mix packed sequences.

    transformers keeps them apart by positions alone, in a call without a mask and without a cache.
    """
    if arguments.get("attention_mask") is not None or arguments.get("use_cache") is not False:
        expected = "expected one sequence per row, or use_cache=False and no attention_mask"
        raise ValueError(f"position_ids: {expected}: this model keeps its own attention, which would mix them")


def _packed_lengths(arguments: Mapping[str, Any]) -> tuple[torch.Tensor, int] | None:
    """Return cu_seqlens of the packed sequences of a call and the longest length; None if each row is a sequence."""
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if arguments.get(NAMES[0]) is not None:
        # With a cache, as in continuous batching, queries and keys differ in length: attention_forward handles that.
        bounds, longest = arguments[NAMES[0]], arguments.get(NAMES[2])
        without_cache = all(arguments.get(name) is None for name in ("cache", "past_key_values"))
        is_new = mask is None or getattr(mask, "ndim", None) == 2
        return (bounds, longest) if without_cache and is_new and isinstance(longest, int) else None
    if positions is None or positions.shape[-1] < 2 or not (mask is None or getattr(mask, "ndim", None) == 2):
        return None
    if positions.ndim == 3 and len(positions) == TEXT:
        positions = positions[0]
    if positions.ndim not in (2, 3):
        return None
    inputs = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    batch = next((len(value) for value in inputs if value is not None), positions.shape[-2])
    cu_seqlens = sequences(positions.expand(*positions.shape[:-2], batch, -1), mask)
    if cu_seqlens is None:
        return None
    if arguments.get("past_key_values") is not None:
        raise ValueError("position_ids: expected one sequence per row with past_key_values, which mix them")
    return cu_seqlens, int(cu_seqlens.diff().max())


def sequences(positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return cu_seqlens of the sequences in the rows of a batch, one row after the other; None if no row has several.

    A sequence ends where the next position is not one more. Padding in such a batch is a sequence of its own.

    Args:
        positions: ``[B, T]``; or ``[3, B, T]``, of time, height and width in images and text: time never goes back
            within a sequence, and no two of its tokens are in the same place.
        mask: ``[B, S]``, S >= T: 0 for padding; the last T columns belong to the tokens.
    """
    steps = positions.diff(dim=-1)
    ends = steps != 1 if steps.ndim == 2 else (steps[0] < 0) | (steps == 0).all(0)
    real = None if mask is None else mask[:, -positions.shape[-1] :].to(positions.device, torch.bool)
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
    begins = nn.functional.pad(ends, (1, 0), value=True).flatten()
    first = begins.nonzero().flatten()
    return torch.cat((first, first.new_full((1,), begins.numel()))).int()


def hook_swap(module: nn.Module, on_new_layer: OnNewLayer) -> Undo:
    """Register the hook on a model; return a function that removes it.

    ``on_new_layer`` is called for each layer that the hook finds without a mark.
    """
    # A copy of a model has its hook already.
    _unhook(module)
    module.register_forward_pre_hook(_Hook(module, on_new_layer), with_kwargs=True)
    return _unhook


def _unhook(module: nn.Module) -> None:
    for number in [number for number, hook in module._forward_pre_hooks.items() if isinstance(hook, _Hook)]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)
