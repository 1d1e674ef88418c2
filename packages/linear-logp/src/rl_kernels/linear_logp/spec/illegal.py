"""Calls of linear_logp that must raise: what is wrong with each, and part of its message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.core.testing.spec import Change
from rl_kernels.lab.check.illegal import (
    Row,
    illegal_backends,
    illegal_ids,
    illegal_numbers,
    illegal_temperatures,
    illegal_thresholds,
    with_main_grad,
)

WEIGHT, MAIN_GRAD = "lm_head_weight", "lm_head_weight.main_grad"


def _bias(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda call: {**call, "bias": make(call[WEIGHT][:, 0])}


def _integers(name: str, expected: str, *outside: int) -> Iterator[Row]:
    """Yield the illegal values of an integer argument."""
    for x in outside:
        yield f"{name} of {x}", given(**{name: x}), ValueError, f"{name}: expected {expected}"
    for value in (True, 32.0, 0.5, "7"):
        yield f"{name} {value!r}", given(**{name: value}), TypeError, f"{name}: expected an integer"


def _other(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64 if x.dtype != torch.float64 else torch.float32)


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def _operands() -> Iterator[Row]:
    yield "hidden not a tensor", given(hidden=[1.0]), TypeError, "hidden: expected a tensor"
    yield "hidden of integers", edited("hidden", torch.Tensor.int), TypeError, "hidden: expected dtype"
    yield "hidden without dims", given(hidden=torch.tensor(1.0)), ValueError, "hidden: expected at least 1 dims"
    yield "weight not a tensor", given(lm_head_weight=None), TypeError, f"{WEIGHT}: expected a tensor"
    yield "weight of integers", edited(WEIGHT, torch.Tensor.int), TypeError, f"{WEIGHT}: expected dtype"
    yield "weight of one dim", edited(WEIGHT, lambda x: x[0]), ValueError, f"{WEIGHT}: expected 2 dims"
    yield "weight of another size", edited(WEIGHT, lambda x: x[:, 1:]), ValueError, f"{WEIGHT}: expected shape"
    yield "empty vocabulary", edited(WEIGHT, lambda x: x[:0]), ValueError, f"{WEIGHT}: expected a vocabulary"
    yield "weight of another dtype", edited(WEIGHT, _other), TypeError, f"{WEIGHT}: expected dtype"
    yield "weight elsewhere", edited(WEIGHT, _elsewhere), ValueError, f"{WEIGHT}: expected device"
    yield "bias not a tensor", given(bias=0.0), TypeError, "bias: expected a tensor"
    yield "bias of another shape", _bias(lambda x: x[1:]), ValueError, "bias: expected shape"
    yield "bias of two dims", _bias(lambda x: x[None]), ValueError, "bias: expected 1 dims"
    yield "bias of another dtype", _bias(_other), TypeError, "bias: expected dtype"
    yield "bias elsewhere", _bias(_elsewhere), ValueError, "bias: expected device"
    yield "main_grad of FP64", with_main_grad(WEIGHT, torch.Tensor.double), TypeError, f"{MAIN_GRAD}: expected dtype"
    yield "main_grad cut off", with_main_grad(WEIGHT, lambda x: x[1:]), ValueError, f"{MAIN_GRAD}: expected shape"
    yield "main_grad elsewhere", with_main_grad(WEIGHT, _elsewhere), ValueError, f"{MAIN_GRAD}: expected device"


def _options() -> Iterator[Row]:
    yield from _integers("workspace_mib", "an integer >= 1", 0)
    yield "workspace of 70 bits", given(workspace_mib=2**70), ValueError, "workspace_mib: expected an integer <="
    yield from _integers("saved_mib", "an integer >= 0", -1)
    yield from _integers("join_tokens", "None or a multiple of 16 rows, at least 16", 0, 8, 24, -16)
    yield from _integers("vocab_segments", "1 or 8", 2)
    yield from _integers("vocab_size", "", 10**6)
    yield "a group's name", given(process_group="tp"), TypeError, "process_group: expected a ProcessGroup"
    yield from illegal_numbers("softcap", ">= 0", -1.0)
    yield from illegal_numbers("logit_scale", "> 0", 0.0, -0.5, 1e-50)
    yield "softcap of 1e-50", given(softcap=1e-50), ValueError, "softcap: expected a number > 0"
    apart = "logit_scale / softcap: expected a number within"
    yield "softcap and logit_scale apart", given(softcap=1e-30, logit_scale=1e30), ValueError, apart
    apart = "temperature / logit_scale: expected a number > 0"
    yield "temperature and logit_scale apart", given(temperature=1e-30, logit_scale=1e30), ValueError, apart
    yield from illegal_backends("linear_logp")


def _kept_ids() -> Iterator[Row]:
    def kept(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
        # Unchanged, each row keeps its target alone.
        return lambda call: {**call, "kept_ids": change(call["target_ids"][..., None])}

    def with_threshold(call: Inputs) -> Inputs:
        least = torch.full_like(call["target_ids"], -torch.inf, dtype=compute_dtype(call["hidden"].dtype))
        return {**call, "kept_ids": call["target_ids"][..., None], "min_logit": least}

    yield "kept_ids not a tensor", given(kept_ids=[[1]]), TypeError, "kept_ids: expected a tensor"
    yield "kept_ids of FP32", kept(torch.Tensor.float), TypeError, "kept_ids: expected dtype"
    yield "kept_ids of other rows", kept(lambda ids: ids[1:]), ValueError, "kept_ids: expected shape"
    yield "kept_ids without an id", kept(lambda ids: ids[..., :0]), ValueError, "kept_ids: expected a last dim"
    yield "kept_ids elsewhere", kept(_elsewhere), ValueError, "kept_ids: expected device"
    beyond = "kept_ids: expected values in .* or -1"
    yield "kept_ids above the vocabulary", kept(lambda ids: ids + 10**6), ValueError, beyond
    yield "kept_ids of -2", kept(lambda ids: ids * 0 - 2), ValueError, beyond
    yield "kept_ids without targets", kept(lambda ids: ids * 0 - 1), ValueError, "target_ids: expected .* in kept_ids"
    yield "kept_ids and min_logit", with_threshold, ValueError, "kept_ids: expected None with min_logit"


ILLEGAL = (
    *(IllegalCall(*row) for row in (*_operands(), *_options(), *_kept_ids())),
    *illegal_ids("target_ids"),
    *illegal_temperatures("target_ids"),
    *illegal_thresholds("target_ids"),
)
