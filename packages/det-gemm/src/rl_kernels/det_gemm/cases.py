"""The cases of det_gemm, det_linear and det_gemm_dw: inputs, error budget, promised layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from rl_kernels.core.testing import (
    Case,
    Draw,
    Inputs,
    RowLayout,
    Spec,
    Variant,
)
from rl_kernels.det_gemm import reference
from rl_kernels.det_gemm.illegal import ILLEGAL

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

EMPTY = (
    Case("no-rows", _sizes(0, 7, 9)),
    Case("no-rows-linear", _sizes(0, 7, 9), BIAS, LINEAR),
    Case("no-rows-dw", _sizes(0, 7, 9), {}, DW, grad=False),
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


TRANSFORMS = {**ROWS.transforms(), "layouts": layouts, "leading": leading, "zero-rows": zero_rows}
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
    empty=EMPTY,
    writes={"accumulate_into": "output"},
    unread=frozenset({"backend"}),
)
