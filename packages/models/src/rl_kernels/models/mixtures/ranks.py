"""The ranks that share the experts of a module."""

from __future__ import annotations

from typing import Any

RANKS = "_rl_kernels_expert_ranks"
"""Attribute of a module whose experts are cut over ranks: its ``ExpertRanks``."""


class ExpertRanks:
    """The ranks that share the experts of a module, and the number of experts of all of them."""

    def __init__(self, group: Any, count: int) -> None:
        self.group, self.count = group, count

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRanks:
        """Return the same object: a copy of a model runs on the same ranks."""
        return self

    def __getstate__(self) -> Any:
        """Refuse a pickle: another process has other ranks."""
        raise TypeError("parallelize_experts: a model whose experts are cut cannot be pickled; save its state_dict")
