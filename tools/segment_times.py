"""Times of products with segments beside cuBLAS and the plain product, in turn, on one GPU.

Shapes are o_proj and down_proj of Llama-3.1-8B and 70B, and a column shard of 70B for 8 GPUs. Each number is the median
over replays of CUDA graphs whose products rotate through copies of the operands that do not fit into the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.det_gemm import det_gemm
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.report import digits

SHAPES = ((1280, 8192), (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
"""N and K."""
ROWS = (1, 32, 128, 1024, 4096, 8192)
SEGMENTS = {"plain": 1, "2 segments": 2, "8 segments": 8}
PACKAGES = ("rl-kernels-core", "rl-kernels-det-gemm")
FOOTPRINT, LEAST, ROUNDS = 300e6, 4e-3, 7
"""Bytes of all copies, seconds of a graph, graphs of each product."""


def graph_of(call: Callable[[int], object], copies: int, repeats: int) -> torch.cuda.CUDAGraph:
    """Capture ``repeats`` rounds of a product over all copies of its operands."""
    for copy in range(copies):
        call(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for copy in range(copies):
                call(copy)
    return graph


def times(m: int, n: int, k: int, gradient: bool) -> dict[str, float]:
    """Return microseconds of cuBLAS, and of det_gemm with each number of segments."""
    copies = max(1, min(16, round(FOOTPRINT / (2 * (n * k + m * k)))))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    lefts = [torch.randn(m, k, **options) for _ in range(copies)]
    weights = [torch.randn(*((k, n) if gradient else (n, k)), **options) * k**-0.5 for _ in range(copies)]
    rights = weights if gradient else [weight.t() for weight in weights]
    calls: dict[str, Callable[[int], object]] = {"cuBLAS": lambda copy: lefts[copy] @ rights[copy]}
    for name, segments in SEGMENTS.items():
        calls[name] = lambda copy, segments=segments: det_gemm(lefts[copy], rights[copy], k_segments=segments)
    expected = max(2 * m * n * k / 6e14, 2 * n * k / 3e12)
    repeats = max(1, round(LEAST / expected / copies))
    graphs = [graph_of(call, copies, repeats) for call in calls.values()]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, microseconds in zip(graphs, spent, strict=True):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            microseconds.append(begin.elapsed_time(end) * 1e3 / (copies * repeats))
    return {name: median(microseconds) for name, microseconds in zip(calls, spent, strict=True)}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times."""
    parser = Parser("segment_times.py", __doc__)
    parser.add_argument("--rows", type=count(1), nargs="+", default=ROWS, help="M of the products")
    parser.add_argument("--gradient", action="store_true", help="the weight lies as for the gradient of the input")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {"version": 1, "environment": environment(torch.device("cuda"), PACKAGES), "us": {}}
    for n, k in SHAPES:
        for m in args.rows:
            times_by_way = record["us"].setdefault(f"{n}x{k}", {})[str(m)] = times(m, n, k, args.gradient)
            plain = times_by_way["plain"]
            ratios = (f"{name} {digits(us)} ({us / plain:.2f})" for name, us in times_by_way.items())
            print(f"{n}x{k}, M = {m}: {', '.join(ratios)}", flush=True)
            torch.cuda.empty_cache()
    if args.json:
        write_json(args.json, record)


if __name__ == "__main__":
    main()
