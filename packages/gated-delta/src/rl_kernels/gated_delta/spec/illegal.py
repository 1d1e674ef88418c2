"""Calls of gated_delta_rule that must raise: what is wrong with each, and part of its message."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import IllegalCall, edited, given

ILLEGAL = (
    IllegalCall("x not a tensor", given(x=1.0), TypeError, "x: expected a tensor"),
    IllegalCall("x of integers", edited("x", torch.Tensor.int), TypeError, "x: expected dtype"),
    IllegalCall("x without dims", edited("x", lambda x: x[0, 0]), ValueError, "x: expected at least 1 dims"),
    IllegalCall("y of another shape", edited("y", lambda y: y[1:]), ValueError, "y: expected shape"),
    IllegalCall("y of another dtype", edited("y", torch.Tensor.double), TypeError, "y: expected dtype"),
    IllegalCall("y elsewhere", edited("y", lambda y: y.to("meta")), ValueError, "y: expected device"),
    IllegalCall("scale text", given(scale="2"), TypeError, "scale: expected a number"),
    IllegalCall("scale infinite", given(scale=float("inf")), ValueError, "scale: expected a finite number"),
    IllegalCall("unknown backend", given(backend="no-such"), ValueError, "backend: gated_delta_rule has no backend"),
)
