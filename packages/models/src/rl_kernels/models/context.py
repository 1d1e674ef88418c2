"""Attention of a model whose sequences are cut over ranks, and what a call of it must look like."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rl_kernels.attention import cut_context, det_attention

CONTEXT = "_rl_kernels_context_ranks"
"""Attribute of a module of a model whose sequences are cut over ranks: its ``ContextRanks``."""


class ContextRanks:
    """The ranks that share the sequences of a model."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextRanks:
        """Return the same object: a copy of a model runs on the same ranks."""
        return self

    def __getstate__(self) -> Any:
        """Refuse a pickle: another process has other ranks."""
        raise TypeError("parallelize_context: a model over ranks cannot be pickled; save its state_dict")

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return attention ``[B, T, H, Dv]`` of ``[B, H, T, D]``; ranks are compared in the first call of a kind."""
        rows = (x.transpose(1, 2) for x in (query, key, value))
        return det_attention(*rows, **{**options, "validate": True, "process_group": self.group})


class CheckedCall:
    """Pre-hook of a ``PreTrainedModel``: requires positions of this rank's rows, and neither padding nor a cache."""

    def __init__(self, ranks: ContextRanks, module: nn.Module) -> None:
        self.ranks, self.names = ranks, tuple(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the call, without a cache."""
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if arguments.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values: expected None with sequences over ranks: they are whole, without a cache"
            )
        mask = arguments.get("attention_mask")
        # One of four dims is of our hook of an outer model, which took the gap between two pieces for a boundary.
        if mask is not None and mask.ndim != 4:
            raise ValueError(
                "attention_mask: expected None with sequences over ranks; pad on the right, without a mask"
            )
        self._check_positions(arguments)
        if "use_cache" in self.names:
            arguments["use_cache"] = False
        return (), arguments

    def _check_positions(self, arguments: dict[str, Any]) -> None:
        given = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
        positions, group = arguments.get("position_ids"), self.ranks.group
        whole = torch.arange(given.shape[1] * group.size(), device=given.device)
        expected = cut_context(whole[None], group)
        if not (
            isinstance(positions, torch.Tensor)
            and positions.shape in (expected.shape, given.shape[:2])
            and torch.equal(positions, expected.to(positions).expand_as(positions))
        ):
            raise ValueError(
                "position_ids: expected cut_context(torch.arange(length)[None], mesh): one sequence per row, of which "
                f"each of {group.size()} ranks has {given.shape[1]} tokens"
            )
