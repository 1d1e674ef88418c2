"""Illegal calls that operators share: token ids, temperatures, numbers, gradient buffers, backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.core.testing.spec import Change

Row = tuple[str, Change, type[Exception], str]
"""Name, change of a good call, exception, and part of its message: the fields of an ``IllegalCall``."""


def illegal_backends(operator: str) -> Iterator[Row]:
    """Yield calls with a bad ``backend``."""
    yield "unknown backend", given(backend="no-such"), ValueError, f"backend: {operator} has no backend 'no-such'"
    yield "backend not a name", given(backend=3), TypeError, "backend: expected a name"


def illegal_numbers(name: str, bound: str, *outside: float, optional: bool = False) -> Iterator[Row]:
    """Yield bad values of a number argument: ``outside`` its bound, not finite, beyond FP64, of other types."""
    for value in outside:
        yield f"{name} {value}", given(**{name: value}), ValueError, f"{name}: expected a number {bound}"
    for value in (torch.nan, torch.inf):
        yield f"{name} {value}", given(**{name: value}), ValueError, f"{name}: expected a finite number"
    yield f"{name} beyond FP64", given(**{name: 10**400}), ValueError, f"{name}: expected a number within"
    for other in ("1", True, torch.tensor(1.0), *(() if optional else (None,))):
        yield f"{name} {other!r}", given(**{name: other}), TypeError, f"{name}: expected a number"


def with_main_grad(name: str, make: Callable[[torch.Tensor], object]) -> Change:
    """Return a change that gives a weight the ``main_grad`` that ``make`` returns for zeros of its shape in FP32."""

    def change(call: Inputs) -> Inputs:
        weight = call[name].detach().clone().requires_grad_()
        weight.main_grad = make(torch.zeros(weight.shape, device=weight.device))
        return {**call, name: weight}

    return change


def illegal_ids(name: str) -> Iterator[IllegalCall]:
    """Yield calls with bad token ids ``[batch, seq]`` or a bad ``ignore_index``."""
    bad: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], type[Exception], str]] = [
        ("of floats", torch.Tensor.float, TypeError, "expected dtype"),
        ("of another shape", lambda ids: ids[:, 1:], ValueError, "expected shape"),
        ("elsewhere", lambda ids: ids.to("meta"), ValueError, "expected device"),
        ("too large", lambda ids: ids + 10**6, ValueError, r"expected values in \[0"),
        ("negative", lambda ids: ids - 10**6, ValueError, r"expected values in \[0"),
    ]
    for label, edit, error, match in bad:
        yield IllegalCall(f"{name} {label}", edited(name, edit), error, f"{name}: {match}")
    yield IllegalCall(
        "ids to be ignored without ignore_index",
        edited(name, lambda ids: torch.full_like(ids, -100)),
        ValueError,
        f"{name}: .* ignore_index=-100 ignores the positions",
    )
    integer = "ignore_index: expected an integer"
    yield IllegalCall("ignore_index float", given(ignore_index=1.5), TypeError, integer)
    yield IllegalCall("ignore_index of 70 bits", given(ignore_index=2**70), ValueError, integer)


def illegal_thresholds(ids: str) -> Iterator[IllegalCall]:
    """Yield calls with a bad ``min_logit``; per-token ones have the shape and device of the argument ``ids``."""

    def filled(value: float, **options: object) -> Change:
        def change(call: Inputs) -> Inputs:
            given_options: dict[str, object] = {"dtype": compute_dtype(next(iter(call.values())).dtype), **options}
            least: torch.Tensor = torch.full_like(call[ids], value, **given_options)  # type: ignore[arg-type]
            return {**call, "min_logit": least}

        return change

    def shorter(call: Inputs) -> Inputs:
        call = filled(0.0)(call)
        return {**call, "min_logit": call["min_logit"][1:]}

    bad: list[tuple[str, Change, type[Exception], str]] = [
        ("a number", given(min_logit=0.5), TypeError, "min_logit: expected a tensor"),
        ("of FP16", filled(0.0, dtype=torch.float16), TypeError, "min_logit: expected dtype"),
        ("of another shape", shorter, ValueError, "min_logit: expected shape"),
        ("elsewhere", filled(0.0, device="meta"), ValueError, "min_logit: expected device"),
        ("that requires grad", filled(-torch.inf, requires_grad=True), ValueError, "min_logit: .* require grad"),
        ("with NaN", filled(torch.nan), ValueError, "min_logit: expected numbers"),
        ("above all logits", filled(1e30), ValueError, f"{ids}: expected tokens whose logit is at least min_logit"),
    ]
    for label, change, error, match in bad:
        yield IllegalCall(f"min_logit {label}", change, error, match)


def illegal_temperatures(ids: str) -> Iterator[IllegalCall]:
    """Yield calls with a bad temperature; per-token ones have the shape and device of the argument ``ids``."""

    def tensor(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
        return lambda call: {**call, "temperature": make(call[ids])}

    bad: list[tuple[str, Change, type[Exception], str]] = [
        ("zero", given(temperature=0.0), ValueError, "expected a number > 0"),
        ("negative", given(temperature=-1), ValueError, "expected a number > 0"),
        ("NaN", given(temperature=float("nan")), ValueError, "expected a finite number"),
        ("beyond FP64", given(temperature=10**400), ValueError, "expected a number"),
        ("text", given(temperature="1"), TypeError, "expected a number"),
        ("of another shape", given(temperature=torch.ones(3)), ValueError, "expected shape"),
        (
            "with a zero in it",
            tensor(lambda x: torch.zeros(x.shape, device=x.device)),
            ValueError,
            "expected values > 0",
        ),
        ("elsewhere", tensor(lambda x: torch.ones(x.shape, device="meta")), ValueError, "expected device"),
    ]
    for label, change, error, match in bad:
        yield IllegalCall(f"temperature {label}", change, error, f"temperature: {match}")
