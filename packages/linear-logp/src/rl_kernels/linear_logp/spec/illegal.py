"""Calls of linear_logp that must raise: what is wrong with each, and part of its message."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given, illegal_ids, illegal_temperatures
from rl_kernels.core.testing.spec import Change


def _bias(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda call: {**call, "bias": make(call["lm_head_weight"][:, 0])}


def _main_grad(make: Callable[[torch.Tensor], object]) -> Change:
    def change(call: Inputs) -> Inputs:
        weight = call["lm_head_weight"].detach().clone().requires_grad_()
        weight.main_grad = make(weight.detach())
        return {**call, "lm_head_weight": weight}

    return change


def _numbers(name: str, bound: str, *outside: float) -> tuple[IllegalCall, ...]:
    """Return the illegal values of a number argument."""
    wrong = f"{name}: expected a"
    return (
        *(IllegalCall(f"{name} of {x}", given(**{name: x}), ValueError, f"{wrong} number {bound}") for x in outside),
        *(
            IllegalCall(f"{name} of {x}", given(**{name: x}), ValueError, f"{wrong} finite number")
            for x in (torch.nan, torch.inf)
        ),
        IllegalCall(f"{name} beyond FP64", given(**{name: 10**400}), ValueError, f"{wrong} number within"),
        *(
            IllegalCall(f"{name} {x!r}", given(**{name: x}), TypeError, f"{wrong} number")
            for x in ("1", True, None, torch.tensor(1.0))
        ),
    )


def _other(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64 if x.dtype != torch.float64 else torch.float32)


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


ILLEGAL = (
    IllegalCall("hidden not a tensor", given(hidden=[1.0]), TypeError, "hidden: expected a tensor"),
    IllegalCall("hidden of integers", edited("hidden", torch.Tensor.int), TypeError, "hidden: expected dtype"),
    IllegalCall("hidden without dims", given(hidden=torch.tensor(1.0)), ValueError, "hidden: expected at least 1 dims"),
    IllegalCall("weight not a tensor", given(lm_head_weight=None), TypeError, "lm_head_weight: expected a tensor"),
    IllegalCall(
        "weight of integers", edited("lm_head_weight", torch.Tensor.int), TypeError, "lm_head_weight: expected dtype"
    ),
    IllegalCall(
        "weight of one dim", edited("lm_head_weight", lambda x: x[0]), ValueError, "lm_head_weight: expected 2 dims"
    ),
    IllegalCall(
        "weight of another hidden size",
        edited("lm_head_weight", lambda x: x[:, 1:]),
        ValueError,
        "lm_head_weight: expected shape",
    ),
    IllegalCall(
        "empty vocabulary",
        edited("lm_head_weight", lambda x: x[:0]),
        ValueError,
        "lm_head_weight: expected a vocabulary",
    ),
    IllegalCall(
        "weight of another dtype", edited("lm_head_weight", _other), TypeError, "lm_head_weight: expected dtype"
    ),
    IllegalCall(
        "weight elsewhere", edited("lm_head_weight", _elsewhere), ValueError, "lm_head_weight: expected device"
    ),
    IllegalCall("bias not a tensor", given(bias=0.0), TypeError, "bias: expected a tensor"),
    IllegalCall("bias of another shape", _bias(lambda x: x[1:]), ValueError, "bias: expected shape"),
    IllegalCall("bias of two dims", _bias(lambda x: x[None]), ValueError, "bias: expected 1 dims"),
    IllegalCall("bias of another dtype", _bias(_other), TypeError, "bias: expected dtype"),
    IllegalCall("bias elsewhere", _bias(_elsewhere), ValueError, "bias: expected device"),
    IllegalCall("workspace of nothing", given(workspace_mib=0), ValueError, "workspace_mib: expected an integer >= 1"),
    IllegalCall(
        "workspace of 70 bits", given(workspace_mib=2**70), ValueError, "workspace_mib: expected an integer <="
    ),
    IllegalCall("workspace of a fraction", given(workspace_mib=0.5), TypeError, "workspace_mib: expected an integer"),
    IllegalCall("fewer than no logits", given(saved_mib=-1), ValueError, "saved_mib: expected an integer >= 0"),
    IllegalCall("a fraction of logits", given(saved_mib=0.5), TypeError, "saved_mib: expected an integer"),
    *(
        IllegalCall(
            f"join_tokens {x}", given(join_tokens=x), ValueError, "join_tokens: expected None or a multiple of 16"
        )
        for x in (0, 8, 24, -16)
    ),
    IllegalCall("join_tokens a bool", given(join_tokens=True), TypeError, "join_tokens: expected an integer"),
    IllegalCall("join_tokens a float", given(join_tokens=32.0), TypeError, "join_tokens: expected an integer"),
    IllegalCall(
        "group of another kind", given(process_group="tp"), TypeError, "process_group: expected a ProcessGroup"
    ),
    IllegalCall("segments of another number", given(vocab_segments=2), ValueError, "vocab_segments: expected 1 or 8"),
    IllegalCall("segments of a fraction", given(vocab_segments=8.0), TypeError, "vocab_segments: expected an integer"),
    IllegalCall("shard without a group", given(vocab_start=1024), ValueError, "vocab_start: expected 0"),
    IllegalCall("whole of a shard without a group", given(vocab_size=10**6), ValueError, "vocab_size: expected"),
    IllegalCall("vocab_size of text", given(vocab_size="7"), TypeError, "vocab_size: expected an integer"),
    IllegalCall(
        "main_grad of another dtype",
        _main_grad(torch.Tensor.double),
        TypeError,
        "lm_head_weight.main_grad: expected dtype",
    ),
    IllegalCall(
        "main_grad of another shape",
        _main_grad(lambda x: x[1:].float()),
        ValueError,
        "lm_head_weight.main_grad: expected shape",
    ),
    IllegalCall(
        "main_grad elsewhere",
        _main_grad(lambda x: _elsewhere(x.float())),
        ValueError,
        "lm_head_weight.main_grad: expected device",
    ),
    *_numbers("softcap", ">= 0", -1.0),
    *_numbers("logit_scale", "> 0", 0.0, -0.5, 1e-50),
    IllegalCall("softcap of 1e-50", given(softcap=1e-50), ValueError, "softcap: expected a number > 0"),
    IllegalCall(
        "softcap and logit_scale too far apart",
        given(softcap=1e-30, logit_scale=1e30),
        ValueError,
        "logit_scale / softcap: expected a number within",
    ),
    IllegalCall(
        "temperature and logit_scale too far apart",
        given(temperature=1e-30, logit_scale=1e30),
        ValueError,
        "temperature / logit_scale: expected a number > 0",
    ),
    IllegalCall("unknown backend", given(backend="no-such"), ValueError, "backend: linear_logp has no backend"),
    IllegalCall("backend not a name", given(backend=3), TypeError, "backend: expected a name"),
    *illegal_ids("target_ids"),
    *illegal_temperatures("target_ids"),
)
