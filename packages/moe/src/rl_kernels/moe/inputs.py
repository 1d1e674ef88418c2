"""The arguments of the raw ops of experts by name."""

from __future__ import annotations

from typing import NamedTuple

import torch

COUNT = 10
"""Number of the arguments in ``Inputs``, which come first in all schemas of experts."""


class Inputs(NamedTuple):
    """The arguments that all raw ops of experts begin with, in the order of their schemas.

    Shapes are those of ``experts``, of the weights those without ``transposed``; ``op`` says which strides they have.
    Backward reads no ``shared``, and needs ``weights``.
    """

    hidden: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    shared: torch.Tensor | None
    activation: str
    interleaved: bool

    @property
    def differentiable(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors whose gradients backward returns, in its order."""
        return self.hidden, self.weights, self.gate_up, self.down, self.gate_up_bias, self.down_bias
