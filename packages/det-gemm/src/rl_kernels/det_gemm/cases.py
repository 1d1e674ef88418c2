"""The cases of det_gemm, det_linear and det_gemm_dw: inputs, error budget, promised layouts, illegal calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from rl_kernels.core.testing import (
    Case,
    Draw,
    IllegalCall,
    Inputs,
    RowLayout,
    Spec,
    Variant,
    edited,
    given,
    strides,
)
from rl_kernels.core.testing.spec import Change
from rl_kernels.det_gemm import reference

LINEAR, DW = "det_linear", "det_gemm_dw"


def _sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"m_dim": m, "n_dim": n, "k_dim": k}


WIDE, COLUMNS = {"out_dtype": torch.float32}, "columns"
BIAS, BUFFER = {"bias": True}, {"accumulate_into": True}
CASES = (
    Case("plain", _sizes(33, 48, 64)),
    Case("odd", _sizes(7, 13, 37)),
    Case("a-column-major", _sizes(19, 24, 40), {COLUMNS: ("a",)}),
    Case("b-column-major", _sizes(19, 24, 40), {COLUMNS: ("b",)}),
    Case("both-column-major", _sizes(19, 25, 41), {COLUMNS: ("a", "b")}),
    # Its gradients start from an upstream gradient rounded to the operands' dtype, which the gold does not know:
    # test_backends compares their bits with those of that rounded gradient.
    Case("wide-output", _sizes(21, 32, 50), WIDE, grad=False),
    Case("one-row", _sizes(1, 65, 33)),
    Case("one-column", _sizes(9, 1, 100)),
    Case("one-term", _sizes(9, 20, 1)),
    Case("long-and-odd", _sizes(3, 129, 4104)),
    Case("linear", _sizes(10, 40, 48), BIAS, LINEAR),
    Case("linear-no-bias", _sizes(17, 31, 29), {}, LINEAR),
    Case("linear-leading", _sizes(5, 24, 32), {"leading": (2, 3), **BIAS}, LINEAR),
    Case("linear-column-major", _sizes(6, 22, 35), {COLUMNS: ("x", "weight"), **BIAS}, LINEAR),
    Case("dw", _sizes(35, 24, 18), {}, DW, grad=False),
    Case("dw-wide-output", _sizes(20, 17, 33), WIDE, DW, grad=False),
    Case("dw-column-major", _sizes(50, 16, 31), {COLUMNS: ("a", "dc")}, DW, grad=False),
    Case("dw-continued", _sizes(33, 20, 21), BUFFER, DW, grad=False),
    Case("dw-continued-column-major", _sizes(16, 9, 40), {COLUMNS: ("accumulate_into",), **BUFFER}, DW, grad=False),
    Case("qwen2.5-0.5b-gate", _sizes(5, 4864, 896), {}, LINEAR, "full"),
    Case("qwen2.5-0.5b-down", _sizes(5, 896, 4864), {}, LINEAR, "full"),
    Case("qwen2.5-0.5b-key", _sizes(40, 128, 896), BIAS, LINEAR, "full"),
    Case("llama3-8b-value", _sizes(2, 1024, 4096), {}, LINEAR, "full"),
    Case("many-rows", _sizes(700, 33, 70), suite="full"),
    Case("dw-many-rows", _sizes(700, 33, 70), {}, DW, "full", grad=False),
)


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw the operands of the case's function; weights have standard deviation ``K^-0.5``."""
    m, n, k = (case.sizes[name] for name in ("m_dim", "n_dim", "k_dim"))
    asked = case.options
    call: Inputs
    if case.function == LINEAR:
        call = {"x": draw.normal(*asked.get("leading", ()), m, k), "weight": draw.normal(n, k, scale=k**-0.5)}
        call |= {"bias": draw.normal(n)} if "bias" in asked else {}
    elif case.function == DW:
        call = {"a": draw.normal(m, k), "dc": draw.normal(m, n)}
        call |= {"accumulate_into": draw.normal(k, n, dtype=torch.float32)} if "accumulate_into" in asked else {}
    else:
        call = {"a": draw.normal(m, k), "b": draw.normal(k, n, scale=k**-0.5)}
    call |= {name: column_major(call[name]) for name in asked.get(COLUMNS, ())}
    return call | {name: asked[name] for name in ("out_dtype",) if name in asked}


def column_major(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with the last two dims stored column by column."""
    return x.mT.contiguous().mT


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the products that each element of a result is the sum of."""
    size = {name: value.abs() for name, value in call.items() if isinstance(value, torch.Tensor)}
    if case.function == DW:
        return {"output": size["a"].t() @ size["dc"] + size.get("accumulate_into", 0)}
    grad = upstream["output"].abs() if upstream else None
    if case.function != LINEAR:
        terms = {"output": size["a"] @ size["b"]}
        if grad is not None:
            terms |= {"gradient:a": grad @ size["b"].t(), "gradient:b": size["a"].t() @ grad}
        return terms
    terms = {"output": size["x"] @ size["weight"].t() + size.get("bias", 0)}
    if grad is not None:
        rows = grad.flatten(0, -2)
        terms |= {"gradient:x": grad @ size["weight"], "gradient:weight": rows.t() @ size["x"].flatten(0, -2)}
        terms["gradient:bias"] = rows.sum(0)
    return terms


ROWS = RowLayout(
    arguments={"a": 1, "x": 1},
    results=frozenset({"output", "gradient:a", "gradient:x"}),
    functions=frozenset({"", LINEAR}),
)


def layouts(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Store one operand at a time row by row, then column by column."""
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            yield Variant(f"{name} row by row", {**call, name: value.contiguous()})
            yield Variant(f"{name} column by column", {**call, name: column_major(value)})


def leading(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Give the rows of det_linear under other leading dims, and its first row without any."""
    if case.function != LINEAR:
        return
    x = call["x"]

    def shaped(*lead: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
        return lambda name, value: value.reshape(*lead, value.shape[-1]) if name in ROWS.results else value

    rows = x.shape[:-1].numel()
    for lead in ((rows,), (1, rows), (rows, 1, 1)):
        reshaped = {**call, "x": shaped(*lead)("output", x)}
        yield Variant(f"leading dims {lead}", reshaped, find=shaped(*x.shape[:-1]), lift=shaped(*lead))

    def first(name: str, value: torch.Tensor) -> torch.Tensor | None:
        return value.reshape(rows, -1)[0] if name in ROWS.results else None

    alone = {**call, "x": x.reshape(rows, -1)[0]}
    yield Variant("no leading dims", alone, first, lift=lambda name, value: value.reshape(rows, -1)[0])


def zero_rows(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Append rows whose gradient is zero: whatever they hold, no sum over the rows changes a bit."""
    name = "x" if case.function == LINEAR else "a"
    flat = call[name].flatten(0, -2)
    for count in (1, 5, 16, 40):
        longer = {**call, name: torch.cat((flat, draw.normal(count, flat.shape[1], scale=3.0)))}

        def zeros(_: str, value: torch.Tensor, count: int = count) -> torch.Tensor:
            return torch.cat((value.flatten(0, -2), value.new_zeros(count, value.shape[-1])))

        if case.function == DW:
            yield Variant(f"{count} rows", {**longer, "dc": zeros("dc", call["dc"])})
        else:
            yield Variant(f"{count} rows", longer, _flat, lambda key, value: _flat(key, value, len(flat)), zeros)


def _flat(name: str, value: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    return value.flatten(0, -2)[:rows] if name in ROWS.results else value


TRANSFORMS = {**ROWS.transforms(), "strides": strides, "layouts": layouts, "leading": leading, "zero-rows": zero_rows}


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def _buffer(edit: Callable[[torch.Tensor], object]) -> Change:
    def change(call: Inputs) -> Inputs:
        shape = (call["a"].shape[1], call["dc"].shape[1])
        return {**call, "accumulate_into": edit(torch.zeros(shape, device=call["a"].device))}

    return change


def _expanded_buffer(call: Inputs) -> Inputs:
    a = torch.cat((call["a"], call["a"]), 1)  # K is 2 at least, whatever the shape flags say
    out = torch.zeros(1, 1, device=a.device).expand(a.shape[1], call["dc"].shape[1])
    return {**call, "a": a, "accumulate_into": out}


def _main_grad(edit: Callable[[torch.Tensor], object]) -> Change:
    def change(call: Inputs) -> Inputs:
        weight = call["weight"].clone()
        weight.main_grad = edit(torch.zeros(weight.shape, device=weight.device))
        return {**call, "weight": weight}

    return change


def _all_on_meta(call: Inputs) -> Inputs:
    return {name: _elsewhere(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def _operand(name: str, case: str, second: bool) -> Iterator[IllegalCall]:
    """Yield what is wrong with any matrix operand, and with one that must match the operand before it."""
    bad: list[tuple[str, Change, type[Exception], str]] = [
        ("not a tensor", given(**{name: [[1.0]]}), TypeError, "expected a tensor, got list"),
        ("of integers", edited(name, torch.Tensor.int), TypeError, "expected dtype"),
        ("of FP64", edited(name, torch.Tensor.double), TypeError, "expected dtype"),
        ("sparse", edited(name, torch.Tensor.to_sparse), TypeError, "expected a strided tensor"),
        ("without dims", given(**{name: torch.tensor(1.0)}), ValueError, "expected (2|at least 1) dims"),
    ]
    if name != "x":
        bad.append(("of three dims", edited(name, lambda value: value[None]), ValueError, "expected 2 dims"))
    if second:
        bad += [
            ("of another dtype", edited(name, _other_dtype), TypeError, "expected dtype"),
            ("elsewhere", edited(name, _elsewhere), ValueError, "expected device"),
        ]
    return (
        IllegalCall(f"{case}: {name} {what}", change, error, f"{name}: {match}", case)
        for what, change, error, match in bad
    )


def _illegal(case: str, *calls: tuple[str, Change, type[Exception], str]) -> list[IllegalCall]:
    return [IllegalCall(f"{case}: {what}", change, error, match, case) for what, change, error, match in calls]


OPTIONS = (
    ("unknown backend", given(backend="no-such"), ValueError, "backend: det_gemm has no backend 'no-such'"),
    ("backend not a name", given(backend=3), TypeError, "backend: expected a name"),
    ("all where no backend runs", _all_on_meta, ValueError, "backend: .* on meta"),
)
OUT_DTYPE = (
    ("out_dtype of integers", given(out_dtype=torch.int32), ValueError, "out_dtype: expected one of"),
    ("out_dtype FP64", given(out_dtype=torch.float64), ValueError, "out_dtype: expected one of"),
    ("out_dtype text", given(out_dtype="float32"), ValueError, "out_dtype: expected one of"),
)
ILLEGAL = (
    *_operand("a", "plain", second=False),
    *_operand("b", "plain", second=True),
    *_illegal("plain", ("b of another K", edited("b", lambda b: b[1:]), ValueError, "b: expected shape")),
    *_illegal("plain", *OUT_DTYPE, *OPTIONS),
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
        ("bias elsewhere", edited("bias", _elsewhere), ValueError, "bias: expected device"),
        ("main_grad not a tensor", _main_grad(lambda _: [0.0]), TypeError, "main_grad: expected a tensor"),
        ("main_grad of BF16", _main_grad(torch.Tensor.bfloat16), TypeError, "main_grad: expected dtype"),
        ("main_grad of another shape", _main_grad(lambda out: out[None]), ValueError, "main_grad: expected shape"),
        ("main_grad elsewhere", _main_grad(_elsewhere), ValueError, "main_grad: expected device"),
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
        ("buffer elsewhere", _buffer(_elsewhere), ValueError, "accumulate_into: expected device"),
        ("buffer requires grad", _buffer(torch.Tensor.requires_grad_), ValueError, "accumulate_into: .* require grad"),
        ("buffer expanded", _expanded_buffer, ValueError, "accumulate_into: .* stride 0"),
        (
            "buffer with another out_dtype",
            lambda call: _buffer(lambda out: out)({**call, "out_dtype": torch.bfloat16}),
            ValueError,
            "out_dtype: expected None or torch.float32",
        ),
        *OUT_DTYPE,
        *OPTIONS,
    ),
)

RESULTS = ("output", "gradient:a", "gradient:b", "gradient:x", "gradient:weight", "gradient:bias")
SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.det_gemm, LINEAR: reference.det_linear, DW: reference.det_gemm_dw},
    classes=dict.fromkeys(RESULTS, "reduction"),
    differentiable=("a", "b", "x", "weight", "bias"),
    magnitudes=magnitudes,
    transforms=TRANSFORMS,
    illegal=ILLEGAL,
    unread=frozenset({"backend"}),
)
