"""Cases of det_gemm along its dimensions: M, N, K, layouts, dtypes and options, for each of its functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rl_kernels.core.testing import Case
from rl_kernels.lab.dimensions import CHECKED, EDGES, ROWS, paired, swept

LINEAR, DW = "det_linear", "det_gemm_dw"
HALVES = (None, "bf16", "fp16")
VALUES = (None, "ties", "large", "small", "zero-rows")
WIDE = {"out_dtype": torch.float32}
SEGMENTS = {"k_segments": (None, 2, 4, 8), "dx_segments": (None, 2, 4, 8)}
BITS = ("accuracy", "gradients", "invariance")
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"columns": (None, ("a",), ("b",), ("a", "b")), "values": VALUES, "dtype": HALVES, **SEGMENTS},
    LINEAR: {
        "bias": (None, True),
        "leading": (None, (), (2,), (2, 1, 3)),
        "columns": (None, ("x",), ("weight",), ("x", "weight")),
        "values": VALUES,
        "dtype": HALVES,
        **SEGMENTS,
    },
    DW: {
        "accumulate_into": (None, True),
        "out_dtype": (None, torch.float32),
        "columns": (None, ("a",), ("dc",), ("a", "dc")),
        "values": VALUES,
        "dtype": HALVES,
    },
}
TURNS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "": ({}, {"columns": ("b",)}, {"columns": ("a",)}, {"k_segments": 8, "dx_segments": 8}),
    LINEAR: ({"bias": True}, {}, {"bias": True, "columns": ("weight",)}, {"bias": True, "k_segments": 4}),
    DW: ({}, {"accumulate_into": True}, {"columns": ("a",)}),
}
"""Options that the cases of a sweep take in turn."""
SIZES = {"m_dim": 6, "n_dim": 20, "k_dim": 24}
LARGE = (2048, 3584, 4096, 4097, 8192, 11008, 14336, 28672)


def _dimensions() -> Iterator[Case]:
    # In the quick suite each function has every second size, so det_gemm and det_linear have all together.
    for start, (function, axes) in zip((0, 1, 0), AXES.items(), strict=True):
        kind: dict[str, Any] = {"function": function, "grad": function != DW}
        turns, small = TURNS[function], {**SIZES, "m_dim": 18, "n_dim": 13, "k_dim": 19}
        yield from _named(function, paired("pairs", small, axes, **kind))
        for name, sizes in (("m_dim", ROWS), ("n_dim", EDGES), ("k_dim", (*EDGES, 4096))):
            yield from _named(function, swept(name, SIZES, sizes[start::2], turns, **kind))
            yield from _named(function, swept(name, SIZES, sizes[1 - start :: 2], turns, suite="full", **kind))
        yield from _named(function, _beyond(kind))
        large: dict[str, Any] = {"suite": "full", **kind}
        yield from _named(function, swept("n_dim", SIZES, LARGE, turns, **large))
        longer = [size for size in LARGE if size != 4096]
        yield from _named(function, swept("k_dim", SIZES, longer, turns, **large))
        yield from _named(function, swept("m_dim", {**SIZES, "n_dim": 40}, (1024, 4096), turns, **large))
        square = {"m_dim": 200, "n_dim": 520, "k_dim": 1040}
        yield from _named(function, paired("large-pairs", square, axes, suite="full", **kind))
    # For an output in another dtype, the upstream gradient is rounded to the operands' dtype first.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"output-{name}", SIZES, {"out_dtype": dtype}, grad=False, relations=("accuracy",), dtype="bf16")
    special: dict[str, Any] = {"options": {"zero_times_inf": True}, "grad": False, "relations": ("accuracy",)}
    for function in AXES:
        yield from _named(function, iter([Case("zero-times-inf", SIZES, function=function, **special)]))
    # Sums that overflow the operands' dtype, but not the dtype of the output.
    beyond: dict[str, Any] = {"values": "huge", "out_dtype": torch.bfloat16}
    for values in ("huge", "inf"):
        yield Case(f"{values}-fp16", SIZES, {"values": values}, grad=False, relations=("accuracy",), dtype="fp16")
    yield Case("output-beyond-fp16", SIZES, beyond, grad=False, relations=("accuracy",), dtype="fp16")


def _beyond(kind: Mapping[str, Any]) -> Iterator[Case]:
    """Yield products that exceed every limit of a grid or a table in one dim; their other dims are small."""
    function, long = kind["function"], {"m_dim": 3, "n_dim": 5, "k_dim": 28672}
    bias = {"bias": True} if function == LINEAR else {}
    yield Case("n-65600", {"m_dim": 3, "n_dim": 65600, "k_dim": 5}, bias, relations=CHECKED, **kind)
    # Rows and terms of det_linear are those of det_gemm.
    kind_and_suite: dict[str, Any] = {**kind, "suite": "full" if function == LINEAR else "quick"}
    yield Case("m-65600", {"m_dim": 65600, "n_dim": 3, "k_dim": 5}, relations=CHECKED, **kind_and_suite)
    bits = BITS if function == DW else CHECKED
    yield Case("m-8240", {"m_dim": 8240, "n_dim": 4, "k_dim": 3}, relations=bits, **kind_and_suite)
    yield Case("m-24576", {"m_dim": 24576, "n_dim": 8, "k_dim": 40}, relations=("invariance",), **kind_and_suite)
    for name, dtype in (("k-28672", "fp32"), ("k-28672-half", "bf16")):
        yield Case(name, long, relations=BITS, dtype=dtype, **kind_and_suite)
    if not function:
        yield Case("k-28672-wide", long, WIDE, relations=("accuracy",), dtype="bf16", grad=False)


def _named(function: str, cases: Iterator[Case]) -> Iterator[Case]:
    prefix = {"": "", LINEAR: "linear-", DW: "dw-"}[function]
    for case in cases:
        yield Case(**{**vars(case), "name": prefix + case.name})


DIMENSIONS: tuple[Case, ...] = tuple(_dimensions())


def with_values(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return an operand with other values: whole, large or tiny numbers, infinities, or some rows of zeros."""
    if kind == "ties":
        return x.round()
    if kind == "zero-rows":
        return x * (torch.arange(x.shape[-2], device=x.device) % 2)[:, None].to(x.dtype)
    if kind == "inf":
        return torch.cat((x[..., :1] * torch.inf, x[..., 1:]), -1)
    if kind == "huge":
        return (x * 3e4).clamp(-65504, 65504)
    return x * {"large": 100.0, "small": 1e-4}.get(kind or "", 1.0)
