"""Calls of experts that must raise: the mistake, and a pattern of the message."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import IllegalCall, edited, given
from rl_kernels.lab.check.illegal import illegal_backends, with_main_grad


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


ILLEGAL = (
    IllegalCall("hidden not a tensor", given(hidden=1.0), TypeError, "hidden: expected a tensor"),
    IllegalCall("hidden of 64 bits", edited("hidden", torch.Tensor.double), TypeError, "hidden: expected dtype"),
    IllegalCall("hidden with three dims", edited("hidden", lambda x: x[None]), ValueError, "hidden: expected 2 dims"),
    IllegalCall("gate_up of one expert", edited("gate_up", lambda x: x[0]), ValueError, "gate_up: expected 3 dims"),
    IllegalCall("gate_up without up", edited("gate_up", lambda x: x[:, ::2]), ValueError, "gate_up: expected shape"),
    IllegalCall("gate_up quantized", edited("gate_up", torch.Tensor.char), TypeError, "gate_up: expected dtype"),
    IllegalCall("gate_up of another dtype", edited("gate_up", _other_dtype), TypeError, "gate_up: expected dtype"),
    IllegalCall("down of fewer experts", edited("down", lambda x: x[1:]), ValueError, "down: expected shape"),
    IllegalCall("weights not transposed", given(transposed=True), ValueError, "down: expected shape"),
    IllegalCall("ids of floats", edited("ids", torch.Tensor.float), TypeError, "ids: expected dtype"),
    IllegalCall("ids of fewer tokens", edited("ids", lambda x: x[1:]), ValueError, "ids: expected shape"),
    IllegalCall("ids without slots", edited("ids", lambda x: x[:, :0]), ValueError, "ids: expected at least one slot"),
    IllegalCall("ids below 0", edited("ids", lambda x: x - 100), ValueError, r"ids: expected values in \[0, "),
    IllegalCall("ids too large", edited("ids", lambda x: x + 100), ValueError, r"ids: expected values in \[0, "),
    IllegalCall("weights of fewer slots", edited("weights", lambda x: x[:, 1:]), ValueError, "weights: expected shape"),
    IllegalCall("weights of integers", edited("weights", torch.Tensor.long), TypeError, "weights: expected dtype"),
    IllegalCall("bias of one", given(gate_up_bias=torch.zeros(1, 1)), ValueError, "gate_up_bias: expected shape"),
    IllegalCall("shared of other tokens", given(shared=torch.zeros(1, 1)), ValueError, "shared: expected shape"),
    IllegalCall("down elsewhere", edited("down", lambda x: x.to("meta")), ValueError, "down: expected device"),
    IllegalCall("unknown activation", given(activation="relu"), ValueError, "activation: expected one of"),
    IllegalCall("interleaved a number", given(interleaved=1), TypeError, "interleaved: expected a bool"),
    IllegalCall("recompute a number", given(recompute=1), TypeError, "recompute: expected a bool"),
    IllegalCall("a group's name", given(process_group="ep"), TypeError, "process_group: expected a ProcessGroup"),
    IllegalCall("experts of nobody", given(num_experts=1000), ValueError, "gate_up: expected the weights of 1000"),
    IllegalCall("bound of no token", given(max_tokens=0), ValueError, "max_tokens: expected an integer >= "),
    IllegalCall("validate a number", given(validate=1), TypeError, "validate: expected a bool"),
    IllegalCall(
        "main_grad of 16 bits",
        with_main_grad("down", torch.Tensor.bfloat16),
        TypeError,
        "down.main_grad: expected dtype",
    ),
    IllegalCall(
        "main_grad of fewer experts",
        with_main_grad("gate_up", lambda buffer: buffer[1:]),
        ValueError,
        "gate_up.main_grad: expected shape",
    ),
    *(IllegalCall(*row) for row in illegal_backends("experts")),
)
