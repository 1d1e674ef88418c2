"""Calls of det_gemm, det_linear and det_gemm_dw that must raise: the mistake, and a pattern of the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.core.testing.spec import Change
from rl_kernels.lab.check.illegal import Row, illegal_backends, with_main_grad


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def _buffer(edit: Callable[[torch.Tensor], object]) -> Change:
    def change(call: Inputs) -> Inputs:
        shape = (call["a"].shape[1], call["dc"].shape[1])
        return {**call, "accumulate_into": edit(torch.zeros(shape, device=call["a"].device))}

    return change


def _expanded_buffer(call: Inputs) -> Inputs:
    a = torch.cat((call["a"], call["a"]), 1)  # K is at least 2, whatever the shape flags say
    out = torch.zeros(1, 1, device=a.device).expand(a.shape[1], call["dc"].shape[1])
    return {**call, "a": a, "accumulate_into": out}


def _all_on_meta(call: Inputs) -> Inputs:
    return {name: _on_meta(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def _operand(name: str, case: str, second: bool) -> Iterator[IllegalCall]:
    """Yield mistakes in a matrix operand; a ``second`` operand must also match the first one."""
    mistakes: list[Row] = [
        ("not a tensor", given(**{name: [[1.0]]}), TypeError, "expected a tensor, got list"),
        ("of integers", edited(name, torch.Tensor.int), TypeError, "expected dtype"),
        ("of FP64", edited(name, torch.Tensor.double), TypeError, "expected dtype"),
        ("sparse", edited(name, torch.Tensor.to_sparse), TypeError, "expected a strided tensor"),
        ("without dims", given(**{name: torch.tensor(1.0)}), ValueError, "expected (2|at least 1) dims"),
    ]
    if name != "x":
        mistakes.append(("of three dims", edited(name, lambda value: value[None]), ValueError, "expected 2 dims"))
    if second:
        mistakes += [
            ("of another dtype", edited(name, _other_dtype), TypeError, "expected dtype"),
            ("elsewhere", edited(name, _on_meta), ValueError, "expected device"),
        ]
    return (
        IllegalCall(f"{case}: {name} {what}", change, error, f"{name}: {match}", case)
        for what, change, error, match in mistakes
    )


def _illegal(case: str, *calls: Row) -> list[IllegalCall]:
    return [IllegalCall(f"{case}: {what}", change, error, match, case) for what, change, error, match in calls]


OPTIONS: tuple[Row, ...] = (
    *illegal_backends("det_gemm"),
    ("all where no backend runs", _all_on_meta, ValueError, "backend: .* on meta"),
)
SEGMENTS = (
    *(
        (f"{name} {value!r}", given(**{name: value}), ValueError, f"{name}: expected one of 1, 2, 4, 8")
        for name in ("k_segments", "dx_segments")
        for value in (0, 3, 16, -2)
    ),
    ("k_segments a bool", given(k_segments=True), TypeError, "k_segments: expected an integer"),
    ("dx_segments a float", given(dx_segments=2.0), TypeError, "dx_segments: expected an integer"),
)
JOINED = (
    *(
        (f"join_tokens {value}", given(join_tokens=value), ValueError, "join_tokens: expected None or a multiple of 16")
        for value in (0, 8, 40, -16)
    ),
    ("join_tokens a bool", given(join_tokens=True), TypeError, "join_tokens: expected an integer"),
    ("join_tokens a float", given(join_tokens=32.0), TypeError, "join_tokens: expected an integer"),
)
OUT_DTYPE = (
    ("out_dtype of integers", given(out_dtype=torch.int32), ValueError, "out_dtype: expected one of"),
    ("out_dtype FP64", given(out_dtype=torch.float64), ValueError, "out_dtype: expected one of"),
    ("out_dtype text", given(out_dtype="float32"), ValueError, "out_dtype: expected one of"),
)
MAIN_GRADS: tuple[Row, ...] = tuple(
    (f"main_grad {what}", with_main_grad("weight", make), error, f"main_grad: expected {match}")
    for what, make, error, match in (
        ("not a tensor", lambda _: [0.0], TypeError, "a tensor"),
        ("of BF16", torch.Tensor.bfloat16, TypeError, "dtype"),
        ("of another shape", lambda buffer: buffer[None], ValueError, "shape"),
        ("elsewhere", _on_meta, ValueError, "device"),
    )
)
ILLEGAL = (
    *_operand("a", "plain", second=False),
    *_operand("b", "plain", second=True),
    *_illegal("plain", ("b of another K", edited("b", lambda b: b[1:]), ValueError, "b: expected shape")),
    *_illegal("plain", *OUT_DTYPE, *SEGMENTS, *OPTIONS),
    *_operand("x", "linear", second=False),
    *_operand("weight", "linear", second=True),
    *_illegal(
        "linear",
        ("weight of another K", edited("weight", lambda w: w[:, 1:]), ValueError, "weight: expected shape"),
        ("bias not a tensor", given(bias=1.0), TypeError, "bias: expected a tensor"),
        ("bias of FP64", edited("bias", torch.Tensor.double), TypeError, "bias: expected dtype"),
        ("bias of another dtype", edited("bias", _other_dtype), TypeError, "bias: expected dtype"),
        ("bias of two dims", edited("bias", lambda bias: bias[None]), ValueError, "bias: expected 1 dims"),
        ("bias of another N", edited("bias", lambda bias: bias[1:]), ValueError, "bias: expected shape"),
        ("bias elsewhere", edited("bias", _on_meta), ValueError, "bias: expected device"),
        *MAIN_GRADS,
        *SEGMENTS,
        *JOINED,
        *OPTIONS,
    ),
    *_operand("a", "dw", second=False),
    *_operand("dc", "dw", second=True),
    *_illegal(
        "dw",
        ("dc of another M", edited("dc", lambda dc: dc[1:]), ValueError, "dc: expected shape"),
        ("a requires grad", edited("a", torch.Tensor.requires_grad_), ValueError, "a: .* not require grad"),
        ("dc requires grad", edited("dc", torch.Tensor.requires_grad_), ValueError, "dc: .* not require grad"),
        ("buffer not a tensor", _buffer(lambda _: 0), TypeError, "accumulate_into: expected a tensor"),
        ("buffer of BF16", _buffer(torch.Tensor.bfloat16), TypeError, "accumulate_into: expected dtype float32"),
        ("buffer of another shape", _buffer(lambda out: out[None]), ValueError, "accumulate_into: expected shape"),
        ("buffer elsewhere", _buffer(_on_meta), ValueError, "accumulate_into: expected device"),
        ("buffer requires grad", _buffer(torch.Tensor.requires_grad_), ValueError, "accumulate_into: .* require grad"),
        ("buffer expanded", _expanded_buffer, ValueError, "accumulate_into: .* storage of their own"),
        (
            "buffer with another out_dtype",
            lambda call: _buffer(lambda out: out)({**call, "out_dtype": torch.bfloat16}),
            ValueError,
            "out_dtype: expected None or torch.float32",
        ),
        *OUT_DTYPE,
        *JOINED,
        *OPTIONS,
    ),
)
