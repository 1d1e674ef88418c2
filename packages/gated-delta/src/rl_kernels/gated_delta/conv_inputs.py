"""The arguments of causal_conv1d's raw ops by name, its results, and its checks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check

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


class Convolved(NamedTuple):
    """The results of ``causal_conv1d`` with ``return_state``.

    Attributes:
        out: ``[B, T, D]`` in the dtype of x; differentiable.
        state: ``[sequences, 3, D]`` in the dtype of x: the last three inputs of each sequence; differentiable.
    """

    out: torch.Tensor
    state: torch.Tensor


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
    for name, value in (("cu_seqlens", cu_seqlens), ("start", start)):
        if value is not None:
            check.tensor(name, value, check.INTEGERS, ndim=1)
    if cu_seqlens is not None:
        if x.shape[0] != 1:
            raise ValueError(f"x: expected a batch of 1 with cu_seqlens, got shape {tuple(x.shape)}")
        if not len(cu_seqlens):
            raise ValueError("cu_seqlens: expected at least 1 number, got none")
        if start is not None:
            raise ValueError("start: expected None with cu_seqlens, which says where sequences start")
    if start is not None:
        check.shape("start", start, x.shape[:1], "one number for each sequence")
    if state is not None:
        check.tensor("state", state, check.FLOATS, ndim=3)
        check.shape("state", state, call.state_shape, "sequences, the last 3 inputs, channels of x")
        check.same_dtype(x=x, state=state)
    check.same_device(x=x, weight=weight, bias=bias, state=state, cu_seqlens=cu_seqlens, start=start)


def check_bounds(call: ConvInputs) -> None:
    """Require integers within their tensors. Syncs with a GPU; skipped if values cannot be read now."""
    if values_hidden(call.x):
        return
    tokens = call.x.shape[1]
    if call.cu_seqlens is not None:
        _check_bounds(call.cu_seqlens, tokens)
    if call.start is not None:
        check.ids_in_range("start", call.start, tokens + 1, ignorable=False)


def _bounds(cu_seqlens: torch.Tensor, total: int) -> None:
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != total or any(b < a for a, b in pairwise(values)):
        shown = str(values) if len(values) <= 8 else f"{values[:7]} and more, the last {values[-1]}"
        raise ValueError(f"cu_seqlens: expected numbers that ascend from 0 to {total}, the tokens of x, got {shown}")


_check_bounds = define_check("causal_conv1d_check_bounds", "(Tensor cu_seqlens, SymInt total)", _bounds)
