"""Calls of causal_conv1d that must raise: the mistake of each, and what its message must say."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import IllegalCall, edited, given
from rl_kernels.lab.check.illegal import illegal_backends

WEIGHT, STATE, BOUNDS = "weight: expected", "state: expected", "cu_seqlens: expected"


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on another device."""
    return x.to("meta")


ILLEGAL = (
    IllegalCall("x not a tensor", given(x=1.0), TypeError, "x: expected a tensor"),
    IllegalCall("x of integers", edited("x", torch.Tensor.int), TypeError, "x: expected dtype"),
    IllegalCall("x of two dims", edited("x", lambda x: x[0]), ValueError, "x: expected 3 dims"),
    IllegalCall("x without channels", edited("x", lambda x: x[..., :0]), ValueError, "x: expected a last dim"),
    IllegalCall("weight not a tensor", given(weight=1.0), TypeError, "weight: expected a tensor"),
    IllegalCall("weight of nn.Conv1d", edited("weight", lambda w: w[:, None]), ValueError, "weight: expected 2 dims"),
    IllegalCall("three taps", edited("weight", lambda w: w[:, :3]), ValueError, "weight: expected shape"),
    IllegalCall("weight of other channels", edited("weight", lambda w: w[:-1]), ValueError, "weight: expected shape"),
    IllegalCall("weight in FP64", edited("weight", torch.Tensor.double), TypeError, "weight: expected dtype"),
    IllegalCall("weight elsewhere", edited("weight", elsewhere), ValueError, "weight: expected device"),
    IllegalCall("bias of one number", edited("bias", lambda b: b[:1]), ValueError, "bias: expected shape", "bias"),
    IllegalCall("bias of integers", edited("bias", torch.Tensor.int), TypeError, "bias: expected dtype", "bias"),
    IllegalCall("state of another batch", edited("state", lambda s: s[1:]), ValueError, STATE, "state"),
    IllegalCall("state of four inputs", edited("state", lambda s: s[:, [0, 0, 1, 2]]), ValueError, STATE, "state"),
    IllegalCall("state in FP64", edited("state", torch.Tensor.double), TypeError, STATE, "state"),
    IllegalCall("state elsewhere", edited("state", elsewhere), ValueError, STATE, "state"),
    IllegalCall("activation unknown", given(activation="gelu"), ValueError, "activation: expected one of"),
    IllegalCall("return_state a number", given(return_state=1), TypeError, "return_state: expected a bool"),
    IllegalCall("start of floats", edited("start", torch.Tensor.float), TypeError, "start: expected dtype", "left"),
    IllegalCall("start short", edited("start", lambda s: s[1:]), ValueError, "start: expected shape", "left"),
    IllegalCall(
        "start behind the end", edited("start", lambda s: s + 72), ValueError, "start: expected values", "left"
    ),
    IllegalCall("start negative", edited("start", lambda s: s - 1), ValueError, "start: expected values", "left"),
    IllegalCall(
        "start of packed ones", given(start=torch.zeros(1).long()), ValueError, "start: expected None", "packed"
    ),
    IllegalCall(
        "packed batch", edited("x", lambda x: torch.cat((x, x))), ValueError, "x: expected a batch of 1", "packed"
    ),
    IllegalCall("no bounds", edited("cu_seqlens", lambda c: c[:0]), ValueError, BOUNDS, "packed"),
    IllegalCall("bounds of floats", edited("cu_seqlens", torch.Tensor.float), TypeError, BOUNDS, "packed"),
    IllegalCall(
        "bounds too short", edited("cu_seqlens", lambda c: c - (c == c[-1]).int()), ValueError, BOUNDS, "packed"
    ),
    IllegalCall("bounds that descend", edited("cu_seqlens", lambda c: c.flip(0)), ValueError, BOUNDS, "packed"),
    *(IllegalCall(*row) for row in illegal_backends("causal_conv1d")),
)
