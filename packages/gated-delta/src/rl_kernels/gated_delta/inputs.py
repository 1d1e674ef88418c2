"""The arguments of the raw ops by name."""

from __future__ import annotations

from typing import NamedTuple

import torch

COUNT = 10
"""Number of the arguments in ``Inputs``, which come first in all schemas."""


class Inputs(NamedTuple):
    """The arguments that all raw ops begin with, in the order of their schemas.

    Shapes are those of ``gated_delta_rule``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    start: torch.Tensor | None
    scale: float
    normalize_qk: bool

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.v.shape[2] // self.k.shape[2]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of the states of all sequences."""
        return self.sequences, self.v.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def differentiable(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors whose gradients backward returns, in its order."""
        return self[:6]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, sums and decays for operands of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
