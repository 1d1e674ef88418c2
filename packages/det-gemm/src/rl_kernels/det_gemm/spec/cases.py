"""The cases of det_gemm, det_linear and det_gemm_dw: inputs, error budget, promised layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from rl_kernels.core.constants import STEP
from rl_kernels.core.testing import Case, Draw, Inputs, Spec, Variant
from rl_kernels.det_gemm import reference
from rl_kernels.det_gemm.spec.cases_dimensions import DIMENSIONS, with_values
from rl_kernels.det_gemm.spec.illegal import ILLEGAL
from rl_kernels.lab.check.rows import RowLayout

LINEAR, DW = "det_linear", "det_gemm_dw"
CUT_OFF = 2.0**-23 / 2.0**-22
"""Error that a tensor core may add to a partial sum, in units of what the checker allows any sum."""
PIECE = 2**26
"""Partial sums computed at a time, 512 MiB in FP64; memory holds up to two copies of them."""


def _sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"m_dim": m, "n_dim": n, "k_dim": k}


WIDE, COLUMNS = {"out_dtype": torch.float32}, "columns"
BIAS, BUFFER = {"bias": True}, {"accumulate_into": True}
SEGMENTS = {"k_segments": 8, "dx_segments": 4}
JOINED = {"join_tokens": 32}
CASES = (
    Case("plain", _sizes(33, 48, 64)),
    Case("odd", _sizes(7, 13, 37)),
    Case("a-column-major", _sizes(19, 24, 40), {COLUMNS: ("a",)}),
    Case("b-column-major", _sizes(19, 24, 40), {COLUMNS: ("b",)}),
    Case("both-column-major", _sizes(19, 25, 41), {COLUMNS: ("a", "b")}),
    # The upstream gradient is first rounded to the operands' dtype, which the gold does not do: test_backends compares
    # the bits of the gradients with those from a rounded upstream gradient.
    Case("wide-output", _sizes(21, 32, 50), WIDE, grad=False),
    # The sums cancel so far that their order shows, although they are taken in FP64 and rounded to FP32.
    Case("canceling", _sizes(21, 32, 480), {"cancels": 2.0**-16, **WIDE}, grad=False),
    # Halves of the sum are far larger than the whole: rounding one of them would show.
    Case("cancelling-half", _sizes(3, 5, 14336), {"cancels": 2.0**-6}, grad=False, dtype="bf16"),
    Case("one-row", _sizes(1, 65, 33)),
    Case("one-column", _sizes(9, 1, 100)),
    Case("one-term", _sizes(9, 20, 1)),
    Case("long-and-odd", _sizes(3, 129, 4104)),
    Case("linear", _sizes(10, 40, 48), BIAS, LINEAR),
    Case("linear-no-bias", _sizes(17, 31, 29), {}, LINEAR),
    Case("linear-leading", _sizes(5, 24, 32), {"leading": (2, 3), **BIAS}, LINEAR),
    Case("linear-column-major", _sizes(6, 22, 35), {COLUMNS: ("x", "weight"), **BIAS}, LINEAR),
    Case("linear-cancelling", _sizes(1, 40, 48), {"cancels": 2.0**-16, **BIAS}, LINEAR),
    Case("segments", _sizes(19, 40, 200), SEGMENTS),
    Case("segments-column-major", _sizes(7, 33, 300), {COLUMNS: ("a", "b"), **SEGMENTS}),
    # Six of the eight segments of K, and two of the four of N, are empty.
    Case("segments-empty", _sizes(5, 24, 30), SEGMENTS),
    Case("segments-wide-output", _sizes(21, 32, 50), {"k_segments": 2, **WIDE}, grad=False),
    Case("segments-cancelling", _sizes(21, 32, 480), {"cancels": 2.0**-16, **SEGMENTS, **WIDE}, grad=False),
    Case("linear-segments", _sizes(9, 40, 136), {**BIAS, **SEGMENTS}, LINEAR),
    Case("linear-segments-leading", _sizes(5, 56, 96), {"leading": (2, 3), "k_segments": 4, "dx_segments": 2}, LINEAR),
    Case("dw", _sizes(35, 24, 18), {}, DW, grad=False),
    Case("dw-many-steps", _sizes(300, 260, 9), {}, DW, grad=False),
    Case("dw-wide-output", _sizes(20, 17, 33), WIDE, DW, grad=False),
    Case("dw-column-major", _sizes(50, 16, 31), {COLUMNS: ("a", "dc")}, DW, grad=False),
    Case("dw-continued", _sizes(33, 20, 21), BUFFER, DW, grad=False),
    Case("dw-continued-column-major", _sizes(16, 9, 40), {COLUMNS: ("accumulate_into",), **BUFFER}, DW, grad=False),
    Case("dw-joined", _sizes(100, 24, 18), JOINED, DW, grad=False),
    Case("dw-joined-continued", _sizes(96, 20, 21), {**JOINED, **BUFFER}, DW, grad=False),
    Case("dw-joined-wide-output", _sizes(40, 17, 33), {**JOINED, **WIDE}, DW, grad=False),
    Case("linear-joined", _sizes(70, 24, 40), {**JOINED, **BIAS}, LINEAR),
    Case("qwen2.5-0.5b-gate", _sizes(5, 4864, 896), {}, LINEAR, "full"),
    Case("qwen2.5-0.5b-down", _sizes(5, 896, 4864), {}, LINEAR, "full"),
    Case("qwen2.5-0.5b-key", _sizes(40, 128, 896), BIAS, LINEAR, "full"),
    Case("llama3-8b-value", _sizes(2, 1024, 4096), {}, LINEAR, "full"),
    Case("many-rows", _sizes(700, 33, 70), suite="full"),
    Case("dw-many-rows", _sizes(700, 33, 70), {}, DW, "full", grad=False),
    *DIMENSIONS,
)

EMPTY = (
    Case("no-rows", _sizes(0, 7, 9)),
    Case("no-rows-segments", _sizes(0, 7, 9), SEGMENTS),
    Case("no-rows-linear", _sizes(0, 7, 9), BIAS, LINEAR),
    Case("no-rows-dw", _sizes(0, 7, 9), {}, DW, grad=False),
    Case("no-rows-dw-continued", _sizes(0, 7, 9), BUFFER, DW, grad=False),
)


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw the operands of the case's function; weights have standard deviation ``K^-0.5``."""
    m, n, k = (case.sizes[name] for name in ("m_dim", "n_dim", "k_dim"))
    options, cancels = case.options, case.options.get("cancels", 0.0)
    call: Inputs
    if case.function == LINEAR:
        call = {"x": draw.normal(*options.get("leading", ()), m, k), "weight": draw.normal(n, k, scale=k**-0.5)}
        call |= {"bias": _bias(call, n, draw, cancels)} if "bias" in options else {}
    elif case.function == DW:
        call = {"a": draw.normal(m, k), "dc": draw.normal(m, n)}
        # Values that the operands' dtype can represent: a chain must be able to reach them (``continued``).
        call |= {"accumulate_into": draw.normal(k, n).float()} if "accumulate_into" in options else {}
    elif cancels:
        call = _canceling(m, n, k, draw, cancels)
    else:
        call = {"a": draw.normal(m, k), "b": draw.normal(k, n, scale=k**-0.5)}
    first = next(iter(call))
    call[first] = with_values(call[first], options.get("values"))
    if "zero_times_inf" in options:
        zeros, factors = list(call)[:2]
        # One index along K (columns of the first operand; rows for a weight gradient), then all terms of one row.
        call[zeros].narrow(-2 if case.function == DW else -1, 0, 1).zero_()
        call[zeros].narrow(-1 if case.function == DW else -2, 0, 1).zero_()
        call[factors].narrow(-1 if case.function == LINEAR else -2, 0, 1).fill_(torch.inf)
    call |= {name: column_major(call[name]) for name in options.get(COLUMNS, ())}
    return call | {name: options[name] for name in ("out_dtype", "join_tokens", *SEGMENTS) if name in options}


def _canceling(m: int, n: int, k: int, draw: Draw, scale: float) -> Inputs:
    """Return operands ``[x, x, small]`` and ``[w, -w, small]``: only ``small``, of this scale, does not cancel."""
    half, small_terms = k // 3, k - k // 3 * 2
    # To the fifth power: terms then differ so much in size that FP64 sums are rounded too.
    x, w = (draw.normal(*shape, dtype=torch.float64) ** 5 for shape in ((m, half), (half, n)))
    x, w = x.to(draw.dtype), (w * 2.0**-13).to(draw.dtype)
    small = draw.normal(m, small_terms, scale=scale), draw.normal(small_terms, n, scale=scale)
    return {"a": torch.cat((x, x, small[0]), 1), "b": torch.cat((w, -w, small[1]))}


def _bias(call: Inputs, n: int, draw: Draw, cancels: float) -> torch.Tensor:
    """Draw a bias, or return the one that cancels the first row except for its rounding."""
    if not cancels:
        return draw.normal(n)
    return -(call["x"][:1].double() @ call["weight"].double().t())[0].to(draw.dtype)


def column_major(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with the last two dims stored column by column."""
    return x.mT.contiguous().mT


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bound how far rounding can move each element of a result: sums of the magnitudes of its terms."""
    if case.function == DW:
        return {"output": _product_magnitudes(call["a"].t(), call["dc"], call.get("accumulate_into"))}
    grad = upstream["output"] if upstream else None
    if case.function != LINEAR:
        terms = {"output": _product_magnitudes(call["a"], call["b"])}
        if grad is not None:
            terms |= {
                "gradient:a": _product_magnitudes(grad, call["b"].t()),
                "gradient:b": _product_magnitudes(call["a"].t(), grad),
            }
        return terms
    x, weight = call["x"], call["weight"]
    terms = {"output": _product_magnitudes(x, weight.t()) + abs(call.get("bias", 0))}
    if grad is not None:
        rows = grad.flatten(0, -2)
        terms |= {"gradient:x": _product_magnitudes(grad, weight)}
        terms |= {
            "gradient:weight": _product_magnitudes(rows.t(), x.flatten(0, -2)),
            "gradient:bias": rows.abs().sum(0),
        }
    return terms


def _product_magnitudes(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the magnitudes of the terms of ``start + a @ b``; on a GPU, add the truncation of its tensor cores."""
    start = b.new_zeros(()) if start is None else start
    terms = start.abs() + a.abs() @ b.abs()
    return terms + partial_sums(a.flatten(0, -2), b, start).view(terms.shape) * CUT_OFF if a.is_cuda else terms


def partial_sums(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, piece: int = PIECE) -> torch.Tensor:
    """Sum the magnitudes of the partial sums of ``start + a @ b``, one after each step of a tensor core.

    Hopper's truncates each time it adds the terms of a step to its accumulator: by less than one unit in the last place
    of that partial sum. At most ``piece`` of them are computed at a time, or one row.
    """
    columns = b.shape[1]
    rows = max(piece // max(columns, 1), 1)
    if len(a) > rows:
        parts = zip(a.split(rows), start.expand(len(a), columns).split(rows), strict=True)
        return torch.cat([partial_sums(part, b, part_start, piece) for part, part_start in parts])
    left = F.pad(a, (0, -a.shape[1] % STEP)).unflatten(1, (-1, STEP)).transpose(0, 1)
    right = F.pad(b, (0, 0, 0, -b.shape[0] % STEP)).unflatten(0, (-1, STEP))
    total, steps = b.new_zeros(len(a), columns), max(piece // max(len(a) * columns, 1), 1)
    for first in range(0, len(left), steps):
        partial = (left[first : first + steps] @ right[first : first + steps]).cumsum(0).add_(start)
        start = partial[-1].clone()
        total += partial.abs_().sum(0)
    return total


ROWS = RowLayout(
    arguments={"a": 1, "x": 1},
    results=frozenset({"output", "gradient:a", "gradient:x"}),
    functions=frozenset({"", LINEAR}),
    any_leading=False,
)
LINEAR_ROWS = RowLayout(arguments={"x": 1}, results=frozenset({"output", "gradient:x"}), functions=frozenset({LINEAR}))
"""det_linear takes any leading dims."""


def layouts(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Store one operand at a time row by row, then column by column."""
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            yield Variant(f"{name} row by row", {**call, name: value.contiguous()})
            yield Variant(f"{name} column by column", {**call, name: column_major(value)})


def zero_rows(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Add rows with zero gradient, whole steps in front or any number behind: no sum changes a bit."""
    name = "x" if case.function == LINEAR else "a"
    flat = call[name].flatten(0, -2)
    step = call.get("join_tokens", STEP)
    for before, after in ((0, 1), (0, 5), (0, 16), (0, 40), (step, 0), (3 * step, 7)):
        garbage = draw.normal(before + after, flat.shape[1], scale=3.0)
        longer = {**call, name: torch.cat((garbage[:before], flat, garbage[before:]))}
        label = f"{before} rows in front, {after} behind"

        def zeros(_: str, value: torch.Tensor, before: int = before, after: int = after) -> torch.Tensor:
            return F.pad(value.flatten(0, -2), (0, 0, before, after))

        def find(key: str, value: torch.Tensor, before: int = before) -> torch.Tensor:
            return value[before : before + len(flat)] if key in ROWS.results else value

        if case.function == DW:
            yield Variant(label, {**longer, "dc": zeros("dc", call["dc"])})
        else:
            yield Variant(label, longer, _flat, find, zeros)


def _flat(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2) if name in ROWS.results else value


def continued(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Fill the buffer by whole steps of the same chain: rows of the identity, with the buffer's values as gradient."""
    if "accumulate_into" not in call:
        return
    a, dc, buffer = (call[name] for name in ("a", "dc", "accumulate_into"))
    step = call.get("join_tokens", STEP)
    count = -(-a.shape[1] // step) * step
    rows = torch.eye(count, a.shape[1], dtype=a.dtype, device=a.device)
    buffer_rows = F.pad(buffer.to(dc.dtype), (0, 0, 0, count - len(buffer)))
    longer = {
        "a": torch.cat((rows, a)),
        "dc": torch.cat((buffer_rows, dc)),
        "accumulate_into": torch.zeros_like(buffer),
    }
    yield Variant(f"{count} rows that fill the buffer", {**call, **longer})


MORE_TRANSFORMS = {
    "layouts": layouts,
    "leading": LINEAR_ROWS.transforms()["leading"],
    "zero-rows": zero_rows,
    "continued": continued,
}
TRANSFORMS = {**ROWS.transforms(), **MORE_TRANSFORMS}
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
    main_grad=frozenset({"weight"}),
    autocast={LINEAR: ("x", "weight", "bias")},
    unread=frozenset({"backend", "join_tokens"}),
)
