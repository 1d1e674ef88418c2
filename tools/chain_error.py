"""Errors of long chains of sums against FP64, beside cuBLAS: `python tools/chain_error.py` on a GPU.

Two sums are long in training: the gradient of a weight over all tokens of a step, which micro-batches continue in one
`main_grad`, and the gradient of hidden states over the vocabulary. Inputs are BF16; `signs` are normal numbers, whose
sums stay near 0; `one sign` are their absolute values, whose sums grow with every term, so that adds that truncate
shrink them. Shown are the error's norm and the shrink, both relative: 1 - <found, exact> / <exact, exact>. Then the
time of a micro-batch: of a layer's weight gradient, and of the head forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.det_gemm import det_gemm, det_gemm_dw
from rl_kernels.lab.bench.environment import environment
from rl_kernels.linear_logp import linear_logp

TOKENS = (1 << 12, 1 << 17, 1 << 20)
VOCABULARY, ROWS, WIDTH = 151936, 512, 256
MICRO_BATCH, JOIN = 8192, 4096
OF_LAYER, OF_HEAD = (8192, 4096, 14336), (8192, 4096, 128256)
"""Timed sizes: tokens, N and K of a weight gradient; tokens, D and V of a head."""
PACKAGES = ("rl-kernels-core", "rl-kernels-det-gemm", "rl-kernels-linear-logp")
Calls = Mapping[str, Callable[[], object]]
Ways = Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def in_parts(size: int, part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a way that adds products of ``size`` rows to FP32 sums, with rounding adds."""

    def way(a: torch.Tensor, dc: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[1], dc.shape[1], device=a.device)
        for first in range(0, len(a), size):
            total += part(a[first : first + size], dc[first : first + size])
        return total

    return way


def cublas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product in FP32 of operands in BF16."""
    return torch.mm(a, b, out_dtype=torch.float32)


def chain(a: torch.Tensor, dc: torch.Tensor) -> torch.Tensor:
    """Continue one chain over micro-batches, as a weight with ``main_grad`` does."""
    total = torch.zeros(a.shape[1], dc.shape[1], device=a.device)
    for first in range(0, len(a), MICRO_BATCH):
        det_gemm_dw(a[first : first + MICRO_BATCH], dc[first : first + MICRO_BATCH], accumulate_into=total)
    return total


OF_WEIGHTS: Ways = {
    "one chain": chain,
    "join_tokens=4096": lambda a, dc: det_gemm_dw(a, dc, out_dtype=torch.float32, join_tokens=JOIN),
    "cuBLAS": lambda a, dc: cublas(a.t(), dc),
    "cuBLAS of 8192": in_parts(MICRO_BATCH, lambda a, dc: cublas(a.t(), dc)),
}
OF_HIDDEN: Ways = {
    "one chain": lambda p, weight: det_gemm(p, weight, out_dtype=torch.float32),
    "8 segments": lambda p, weight: det_gemm(p, weight, out_dtype=torch.float32, k_segments=8),
    "cuBLAS": cublas,
}


def inputs(rows: int, columns: int, one_sign: bool) -> torch.Tensor:
    """Return normal numbers in BF16, or their absolute values."""
    drawn = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return drawn.abs() if one_sign else drawn


def errors(exact: torch.Tensor, result: torch.Tensor) -> dict[str, float]:
    """Return norm of the error and shrink, relative to the exact result."""
    scale = exact.square().sum()
    return {
        "error": float(((result.double() - exact).square().sum() / scale).sqrt()),
        "shrink": float(1 - (result.double() * exact).sum() / scale),
    }


def exact_of_tokens(a: torch.Tensor, dc: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens in FP64."""
    total = torch.zeros(a.shape[1], dc.shape[1], device=a.device, dtype=torch.float64)
    for first in range(0, len(a), 1 << 16):
        part = slice(first, first + (1 << 16))
        total += a[part].double().t() @ dc[part].double()
    return total


def measured(tokens: Sequence[int]) -> Iterator[tuple[str, str, dict[str, dict[str, float]]]]:
    """Yield the name of the sum, the signs, and the errors of each way."""
    for one_sign in (False, True):
        signs = "one sign" if one_sign else "signs"
        for number in tokens:
            a, dc = inputs(number, WIDTH, one_sign), inputs(number, WIDTH, one_sign)
            exact = exact_of_tokens(a, dc)
            yield f"{number} tokens", signs, {name: errors(exact, way(a, dc)) for name, way in OF_WEIGHTS.items()}
        p, weight = inputs(ROWS, VOCABULARY, one_sign), inputs(VOCABULARY, WIDTH, one_sign)
        exact = p.double() @ weight.double()
        yield f"{VOCABULARY} words", signs, {name: errors(exact, way(p, weight)) for name, way in OF_HIDDEN.items()}


def layer_calls() -> Calls:
    """Return ways to add the weight gradient of one micro-batch to a ``main_grad``."""
    tokens, rows, columns = OF_LAYER
    dc, x = inputs(tokens, rows, False), inputs(tokens, columns, False)
    total = torch.zeros(rows, columns, device="cuda")
    return {
        "one chain": lambda: det_gemm_dw(dc, x, accumulate_into=total),
        "join_tokens=4096": lambda: det_gemm_dw(dc, x, accumulate_into=total, join_tokens=JOIN),
        "cuBLAS": lambda: total.add_(cublas(dc.t(), x)),
    }


def head_calls() -> Calls:
    """Return ways to run the head on one micro-batch, forward and backward, with a ``main_grad``."""
    tokens, width, vocabulary = OF_HEAD
    hidden, weight = inputs(tokens, width, False), inputs(vocabulary, width, False) * width**-0.5
    weight.requires_grad_().main_grad = torch.zeros(vocabulary, width, device="cuda")
    hidden.requires_grad_()
    ids, upstream = torch.randint(vocabulary, (tokens,), device="cuda"), torch.randn(tokens, device="cuda")

    def call(join_tokens: int | None) -> None:
        linear_logp(hidden, weight, ids, join_tokens=join_tokens).backward(upstream)
        hidden.grad = None

    return {"one chain": lambda: call(None), "join_tokens=4096": lambda: call(JOIN)}


def times(calls: Calls, rounds: int = 15) -> dict[str, float]:
    """Return milliseconds of calls: medians, the ways in turn after one round that does not count."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            spent[name].append(begin.elapsed_time(end))
    return {name: median(milliseconds[1:]) for name, milliseconds in spent.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the errors."""
    parser = Parser("chain_error.py", __doc__)
    parser.add_argument("--tokens", type=count(1), nargs="+", default=TOKENS, help="lengths of the sums over tokens")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    record: dict[str, Any] = {"version": 1, "environment": environment(torch.device("cuda"), PACKAGES)}
    record |= {"sums": [], "times": []}
    for label, signs, errors_by_way in measured(args.tokens):
        record["sums"].append({"sum": label, "signs": signs, "ways": errors_by_way})
        listed = (
            f"{name} {way_errors['error']:.1e} (shrink {way_errors['shrink']:.1e})"
            for name, way_errors in errors_by_way.items()
        )
        print(f"{label}, {signs}: {', '.join(listed)}", flush=True)
    for operation, sizes, calls in (
        ("(tokens, N, K) added to `main_grad`", OF_LAYER, layer_calls),
        ("(tokens, D, V) through `linear_logp` and back, with `main_grad`", OF_HEAD, head_calls),
    ):
        label = f"one micro-batch of {' x '.join(map(str, sizes))} {operation}"
        record["times"].append({"what": label, "ms": times(calls())})
        print(f"{label}, ms: {record['times'][-1]['ms']}")
    if args.json:
        write_json(args.json, record)


if __name__ == "__main__":
    main()
