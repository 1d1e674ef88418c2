"""The arguments of causal_conv1d's raw ops by name, and their checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.gated_delta.layouts import check_layout

TAPS = 4
"""Inputs that an output sees: its own token and the three before it."""
PAST = TAPS - 1
"""Inputs of a state."""
COUNT = 7
"""Number of the arguments in ``ConvInputs``, which come first in all schemas."""


class ConvInputs(NamedTuple):
    """The arguments that all raw ops begin with, in the order of their schemas; shapes are those of the function."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    start: torch.Tensor | None
    silu: bool

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the states of all sequences."""
        return self.sequences, PAST, self.x.shape[2]


def check_inputs(call: ConvInputs) -> None:
    """Require tensors whose shapes, dtypes and devices fit, and that form one layout."""
    x, weight, bias, state, cu_seqlens, start, _ = call
    check.tensor("x", x, check.FLOATS, ndim=3)
    if not x.shape[2]:
        raise ValueError(f"x: expected a last dim of at least 1, got shape {tuple(x.shape)}")
    allowed = check.FLOATS if x.dtype == torch.float64 else check.HALF_AND_FLOAT
    check.tensor("weight", weight, allowed, ndim=2)
    check.shape("weight", weight, (x.shape[2], TAPS), "channels of x, 4 taps: an nn.Conv1d's weight.squeeze(1)")
    if bias is not None:
        check.tensor("bias", bias, allowed, ndim=1)
        check.shape("bias", bias, x.shape[2:], "channels of x")
    check_layout("x", x, cu_seqlens, start)
    if state is not None:
        check.tensor("state", state, check.FLOATS, ndim=3)
        check.shape("state", state, call.state_shape, "sequences, the last 3 inputs, channels of x")
        check.same_dtype(x=x, state=state)
    check.same_device(x=x, weight=weight, bias=bias, state=state, cu_seqlens=cu_seqlens, start=start)
