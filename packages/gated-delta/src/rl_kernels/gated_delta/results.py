"""The results of both functions with the states."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GatedDelta(NamedTuple):
    """The results of ``gated_delta_rule`` with ``return_state``.

    Attributes:
        out: ``[B, T, Hv, Dv]`` in the dtype of q; differentiable.
        state: ``[sequences, Hv, Dk, Dv]``, FP32: the recurrent states after the last tokens; differentiable.
    """

    out: torch.Tensor
    state: torch.Tensor


class Convolved(NamedTuple):
    """The results of ``causal_conv1d`` with ``return_state``.

    Attributes:
        out: ``[B, T, D]`` in the dtype of x; differentiable.
        state: ``[sequences, 3, D]`` in the dtype of x: the last three inputs of each sequence; differentiable.
    """

    out: torch.Tensor
    state: torch.Tensor
