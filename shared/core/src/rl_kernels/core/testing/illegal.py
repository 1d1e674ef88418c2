"""Illegal calls shared by operators that take token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rl_kernels.core.testing.spec import Change, IllegalCall, edited, given


def illegal_ids(name: str) -> Iterator[IllegalCall]:
    """Yield calls with bad token ids ``[batch, seq]`` or a bad ``ignore_index``."""
    bad: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], type[Exception], str]] = [
        ("of floats", torch.Tensor.float, TypeError, "expected dtype"),
        ("of another shape", lambda ids: ids[:, 1:], ValueError, "expected shape"),
        ("elsewhere", lambda ids: ids.to("meta"), ValueError, "expected device"),
        ("too large", lambda ids: ids + 10**6, ValueError, r"expected values in \[0"),
        ("negative", lambda ids: ids - 10**6, ValueError, r"expected values in \[0"),
    ]
    for what, edit, error, match in bad:
        yield IllegalCall(f"{name} {what}", edited(name, edit), error, f"{name}: {match}")
    yield IllegalCall(
        "ids to be ignored without ignore_index",
        edited(name, lambda ids: torch.full_like(ids, -100)),
        ValueError,
        f"{name}: .* ignore_index=-100 ignores the positions",
    )
    integer = "ignore_index: expected an integer"
    yield IllegalCall("ignore_index float", given(ignore_index=1.5), TypeError, integer)
    yield IllegalCall("ignore_index of 70 bits", given(ignore_index=2**70), ValueError, integer)


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
    for what, change, error, match in bad:
        yield IllegalCall(f"temperature {what}", change, error, f"temperature: {match}")
