"""Tokens sampled from logits: what is returned, and checks of what is asked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check
from rl_kernels.core.torchlib.scalars import scalar_or_rows
from rl_kernels.linear_logp.drawing import MOST_COLUMNS, Request
from rl_kernels.linear_logp.inputs import flat

Parameter = float | torch.Tensor
"""A number, or a tensor of no dims or ``[...]``: one value per row."""
FP32 = torch.float32


class Sampled(NamedTuple):
    """What ``LinearLogits.sample`` returns, each ``[...]``.

    Attributes:
        ids: int64, the tokens.
        kept_logp: FP32, their log-probabilities over the kept entries: those that they were drawn with. The bits of
            ``linear_logp(..., ids, temperature=temperature, min_logit=min_logit)``.
        logp: FP32, their log-probabilities over all entries, at the same temperature.
        min_logit: FP32, the smallest kept z; -inf where no filter is on.
    """

    ids: torch.Tensor
    kept_logp: torch.Tensor
    logp: torch.Tensor
    min_logit: torch.Tensor


def request_of(
    logits: torch.Tensor,
    norm: torch.Tensor,
    temperature: Parameter,
    top_k: int | torch.Tensor,
    top_p: Parameter,
    min_p: Parameter,
    uniform: torch.Tensor | None,
    generator: torch.Generator | None,
    validate: bool,
) -> Request:
    """Check the arguments of ``LinearLogits.sample``; return them for rows ``[N, V]``.

    Raises:
        TypeError, ValueError: an argument is not as described there; the message names it.
    """
    check.tensor("logits", logits, (FP32,))
    if logits.shape[-1] > MOST_COLUMNS:
        raise ValueError(f"logits: expected at most {MOST_COLUMNS} columns to sample from, got {logits.shape[-1]}")
    leading, rows = logits.shape[:-1], logits.shape[:-1].numel()
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if isinstance(value, torch.Tensor):
            check.tensor(name, value, check.INTEGERS if name == "top_k" else check.FLOATS)
            check.same_device(logits=logits, **{name: value})
            if value.ndim:
                check.shape(name, value, leading, "one value per row")
        elif name == "top_k":
            check.integer(name, value, least=0)
        else:
            check.number(name, value, least=0)
    _check_numbers(temperature, top_p, min_p)
    if uniform is None:
        uniform = torch.rand(leading, generator=generator, dtype=torch.float64, device=logits.device)
    else:
        if generator is not None:
            raise ValueError("generator: expected None where uniform is given")
        check.tensor("uniform", uniform, (FP32, torch.float64))
        check.shape("uniform", uniform, leading, "the leading dims of the logits")
        check.same_device(logits=logits, uniform=uniform)
    request = Request(
        scalar_or_rows(temperature, rows, FP32),
        None if _is(top_k, 0) else scalar_or_rows(top_k, rows, FP32),
        None if _is(top_p, 1) else scalar_or_rows(top_p, rows, FP32),
        None if _is(min_p, 0) else -scalar_or_rows(min_p, rows, FP32).double().log().to(FP32),
        flat(uniform),
    )
    if validate and rows and not values_hidden(logits):
        _check_values(norm.view(-1, 2), request, top_k, top_p, min_p)
    return request


def _is(value: Parameter, off: float) -> bool:
    return not isinstance(value, torch.Tensor) and value == off


def _check_numbers(temperature: Parameter, top_p: Parameter, min_p: Parameter) -> None:
    """Check the ranges of parameters that are numbers."""
    tiny = check.RANGES[FP32][0]
    if not isinstance(temperature, torch.Tensor) and 0 < temperature < tiny:
        raise ValueError(f"temperature: expected 0, or a number >= {tiny:.3g}, got {temperature}")
    if not isinstance(top_p, torch.Tensor) and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p}")
    if not isinstance(min_p, torch.Tensor) and not min_p < 1:
        raise ValueError(f"min_p: expected a number in [0, 1), got {min_p}")


def _check_values(norm: torch.Tensor, request: Request, top_k: Any, top_p: Any, min_p: Any) -> None:
    """Check the values of tensors, by one sync with a GPU."""
    temperature, uniform = request.temperature, request.uniform
    top = norm[:, 0] / torch.where(temperature == 0, 1.0, temperature).to(norm.device)
    ranges = {
        "logits: expected no NaN, finite maxima, also over the temperature, in every row": top.isfinite()
        & ~norm.isnan().any(1),
        "uniform: expected numbers in [0, 1)": (uniform >= 0) & (uniform < 1),
    }
    if isinstance(top_k, torch.Tensor):
        ranges["top_k: expected integers >= 0"] = top_k >= 0
    if isinstance(top_p, torch.Tensor):
        ranges["top_p: expected numbers in (0, 1]"] = (top_p > 0) & (top_p <= 1)
    if isinstance(min_p, torch.Tensor):
        ranges["min_p: expected numbers in [0, 1)"] = (min_p >= 0) & (min_p < 1)
    if temperature.ndim:
        is_number = (temperature == 0) | ((temperature >= check.RANGES[FP32][0]) & temperature.isfinite())
        ranges["temperature: expected 0, or finite numbers > 0"] = is_number
    _check_all(torch.stack([is_right.all() for is_right in ranges.values()]), list(ranges))


def _require_all(are_right: torch.Tensor, messages: list[str]) -> None:
    for is_right, message in zip(are_right.tolist(), messages, strict=True):
        if not is_right:
            raise ValueError(message)


_check_all = define_check("check_all", "(Tensor are_right, str[] messages)", _require_all)
