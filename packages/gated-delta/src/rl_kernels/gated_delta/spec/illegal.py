"""Calls of gated_delta_rule that must raise: the mistake, and a pattern of the message."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import IllegalCall, edited, given
from rl_kernels.lab.check.illegal import illegal_backends


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


BOUNDS = r"cu_seqlens: expected numbers that ascend from 0 to"
ILLEGAL = (
    IllegalCall("q not a tensor", given(q=1.0), TypeError, "q: expected a tensor"),
    IllegalCall("q of integers", edited("q", torch.Tensor.int), TypeError, "q: expected dtype"),
    IllegalCall("q of one head", edited("q", lambda x: x[:, :, 0]), ValueError, "q: expected 4 dims"),
    IllegalCall("q of an odd size", edited("q", lambda x: x[..., :15]), ValueError, "q: expected a head size"),
    IllegalCall("k of fewer tokens", edited("k", lambda x: x[:, 1:]), ValueError, "k: expected shape"),
    IllegalCall("k of another dtype", edited("k", _other_dtype), TypeError, "k: expected dtype"),
    IllegalCall("v of fewer sequences", edited("v", lambda x: x[1:]), ValueError, "v: expected shape"),
    IllegalCall("v of no multiple of heads", edited("v", lambda x: x[:, :, :-1]), ValueError, "v: expected a number of", "scaled"),
    IllegalCall("g of one head", edited("g", lambda x: x[..., :1]), ValueError, "g: expected shape"),
    IllegalCall("g of integers", edited("g", torch.Tensor.int), TypeError, "g: expected dtype"),
    IllegalCall("beta of one number", given(beta=0.5), TypeError, "beta: expected a tensor"),
    IllegalCall("beta elsewhere", edited("beta", lambda x: x.to("meta")), ValueError, "beta: expected device"),
    IllegalCall("scale text", given(scale="2"), TypeError, "scale: expected a number"),
    IllegalCall("scale infinite", given(scale=float("inf")), ValueError, "scale: expected a finite number"),
    IllegalCall("normalize_qk a number", given(normalize_qk=1), TypeError, "normalize_qk: expected a bool"),
    IllegalCall("return_state a number", given(return_state=1), TypeError, "return_state: expected a bool"),
    IllegalCall("states of fewer sequences", given(initial_state=torch.zeros(1, 1, 1, 1)), ValueError, "initial_state: "),
    IllegalCall("states of 16 bits", given(initial_state=torch.zeros(1).half()), TypeError, "initial_state: expected dt"),
    IllegalCall("cache of tensors", given(cache=(1, 2)), TypeError, "cache: expected a DeltaCache"),
    IllegalCall("start of floats", given(start=torch.zeros(1)), TypeError, "start: expected dtype"),
    IllegalCall("bounds of a batch", given(cu_seqlens=torch.zeros(1).int()), ValueError, "q: expected a batch of 1"),
    *(
        IllegalCall(f"bounds {name}", edited("cu_seqlens", edit), ValueError, BOUNDS, case="packed")
        for name, edit in {
            "too long": lambda x: x + (x == x.max()),
            "from 1": lambda x: x.clamp(min=1),
            "in reverse": lambda x: x.flip(0),
        }.items()
    ),
    IllegalCall("bounds and start", given(start=torch.zeros(1).int()), ValueError, "start: expected None", case="packed"),
    IllegalCall("no bounds", edited("cu_seqlens", lambda x: x[:0]), ValueError, "cu_seqlens: expected at", case="packed"),
    IllegalCall("start too late", edited("start", lambda x: x + 1000), ValueError, "start: expected values", case="left"),
    IllegalCall("start of fewer", edited("start", lambda x: x[1:]), ValueError, "start: expected shape", case="left"),
    *(IllegalCall(*row) for row in illegal_backends("gated_delta_rule")),
)
