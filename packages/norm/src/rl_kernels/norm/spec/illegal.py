"""Calls of rms_norm and layer_norm that must raise: the mistake of each, and what its message must say."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.lab.check.illegal import illegal_backends, with_main_grad

BF16 = with_main_grad("weight", torch.Tensor.bfloat16)
CUT = with_main_grad("weight", lambda buffer: buffer[1:])
SHORT = edited("x", lambda x: x[..., :-1])
RESIDUAL, GATE = "residual: expected", "gate: expected"


def both(call: Inputs) -> Inputs:
    """Give a residual besides the gate."""
    return {**call, "residual": call["x"]}


ILLEGAL = (
    IllegalCall("x not a tensor", given(x=1.0), TypeError, "x: expected a tensor"),
    IllegalCall("x of integers", edited("x", torch.Tensor.int), TypeError, "x: expected dtype"),
    IllegalCall("x without dims", edited("x", lambda x: x[0, 0]), ValueError, "x: expected at least 1 dims"),
    IllegalCall(
        "x without columns", edited("x", lambda x: x[:, :0]), ValueError, "x: expected a last dim of at least 1"
    ),
    IllegalCall("x narrower than the weight", SHORT, ValueError, "weight: expected shape"),
    IllegalCall("weight not a tensor", given(weight=1.0), TypeError, "weight: expected a tensor"),
    IllegalCall("weight of integers", edited("weight", torch.Tensor.int), TypeError, "weight: expected dtype"),
    IllegalCall("weight in FP64", edited("weight", torch.Tensor.double), TypeError, "weight: expected dtype"),
    IllegalCall("weight of two dims", edited("weight", lambda w: w[None]), ValueError, "weight: expected 1 dims"),
    IllegalCall("weight elsewhere", edited("weight", lambda w: w.to("meta")), ValueError, "weight: expected device"),
    IllegalCall("bias of one number", edited("bias", lambda b: b[:1]), ValueError, "bias: expected shape", "layer"),
    IllegalCall("bias of integers", edited("bias", torch.Tensor.int), TypeError, "bias: expected dtype", "layer"),
    IllegalCall("bias elsewhere", edited("bias", lambda b: b.to("meta")), ValueError, "bias: expected device", "layer"),
    IllegalCall("residual not a tensor", given(residual=1.0), TypeError, "residual: expected a tensor", "residual"),
    IllegalCall("residual short", edited("residual", lambda r: r[1:]), ValueError, RESIDUAL, "residual"),
    IllegalCall("residual in FP64", edited("residual", torch.Tensor.double), TypeError, RESIDUAL, "residual"),
    IllegalCall("residual elsewhere", edited("residual", lambda r: r.to("meta")), ValueError, RESIDUAL, "residual"),
    IllegalCall("gate not a tensor", given(gate=1.0), TypeError, "gate: expected a tensor"),
    IllegalCall("gate short", edited("gate", lambda z: z[1:]), ValueError, GATE, "gated"),
    IllegalCall("gate in FP64", edited("gate", torch.Tensor.double), TypeError, GATE, "gated"),
    IllegalCall("gate elsewhere", edited("gate", lambda z: z.to("meta")), ValueError, GATE, "gated"),
    IllegalCall("gate and residual", both, ValueError, "gate: expected None with a residual", "gated"),
    IllegalCall("eps text", given(eps="1e-6"), TypeError, "eps: expected a number"),
    IllegalCall("eps negative", given(eps=-1e-6), ValueError, "eps: expected a number >= 0"),
    IllegalCall("eps infinite", given(eps=float("inf")), ValueError, "eps: expected a finite number"),
    IllegalCall("offset NaN", given(offset=float("nan")), ValueError, "offset: expected a finite number"),
    IllegalCall("offset a tensor", given(offset=torch.ones(())), TypeError, "offset: expected a number"),
    IllegalCall("cast_first a number", given(cast_first=1), TypeError, "cast_first: expected a bool"),
    IllegalCall("buffer in BF16", BF16, TypeError, r"weight\.main_grad: expected dtype"),
    IllegalCall("buffer too short", CUT, ValueError, r"weight\.main_grad: expected"),
    *(IllegalCall(*row) for row in illegal_backends("rms_norm")),
)
