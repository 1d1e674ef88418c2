"""Attention of a model whose sequences are cut over ranks, and what a call of it must look like."""

from __future__ import annotations

import inspect
from typing import Any

import torch

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

    def __init__(self, ranks: ContextRanks, module: Any) -> None:
        self.ranks, self.names = ranks, tuple(inspect.signature(type(module).forward).parameters)[1:]
        self.attention = module.config._attn_implementation

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the call, without a cache."""
        if module.config._attn_implementation != self.attention:
            raise ValueError(
                f"config: expected the attention of invariant(), got {module.config._attn_implementation}, which sees "
                "the tokens of this rank alone"
            )
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if arguments.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values: expected None with sequences over ranks: they are whole, without a cache"
            )
        mask = arguments.get("attention_mask")
        # Our hook of an outer model took the gap between two pieces for a boundary.
        is_ours = isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.dtype == torch.int32
        if mask is not None and not is_ours:
            raise ValueError(
                "attention_mask: expected None with sequences over ranks; pad on the right, without a mask"
            )
        if arguments.get("cu_seq_lens_q") is not None and not is_ours:
            raise ValueError("cu_seq_lens_q: expected None with sequences over ranks, one in each row")
        if arguments.get("labels") is not None and arguments.get("shift_labels") is None:
            raise ValueError(
                "labels: expected None with sequences over ranks, because the next row of a rank may be another token: "
                "score cut_context(targets, mesh) with head_logp, or pass it as shift_labels too"
            )
        self._check_positions(arguments)
        if "use_cache" in self.names:
            arguments["use_cache"] = False
        return (), arguments

    def _check_positions(self, arguments: dict[str, Any]) -> None:
        given = next((x for name in ("input_ids", "inputs_embeds") if (x := arguments.get(name)) is not None), None)
        if given is None:
            raise ValueError("input_ids: expected this rank's tokens, or inputs_embeds")
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
