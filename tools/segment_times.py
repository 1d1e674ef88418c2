"""Times of products with segments beside cuBLAS and the plain product, in turn, on one GPU: a table in Markdown.

Shapes are o_proj and down_proj of Llama-3.1-8B and 70B, and a column shard of 70B for 8 GPUs. Each number is the median
over replays of CUDA graphs whose products rotate through copies of the operands that do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

from rl_kernels.det_gemm import det_gemm

SHAPES = ((1280, 8192), (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
"""N and K."""
ROWS = (1, 32, 128, 1024, 4096, 8192)
SEGMENTS = (1, 2, 8)
FOOTPRINT, LEAST, ROUNDS = 300e6, 4e-3, 7
"""Bytes of all copies, seconds of a graph, graphs of each product."""


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--rows", type=int, nargs="+", default=ROWS, help="M of the products")
    made.add_argument("--gradient", action="store_true", help="the weight lies as for the gradient of the input")
    return made


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


def times(m: int, n: int, k: int, gradient: bool) -> list[float]:
    """Return microseconds of cuBLAS, then of det_gemm with each number of segments."""
    copies = max(1, min(16, round(FOOTPRINT / (2 * (n * k + m * k)))))
    made = {"device": "cuda", "dtype": torch.bfloat16}
    left = [torch.randn(m, k, **made) for _ in range(copies)]
    weights = [torch.randn(*((k, n) if gradient else (n, k)), **made) * k**-0.5 for _ in range(copies)]
    right = weights if gradient else [weight.t() for weight in weights]
    calls: list[Callable[[int], object]] = [lambda copy: left[copy] @ right[copy]]
    calls += [lambda copy, s=s: det_gemm(left[copy], right[copy], k_segments=s) for s in SEGMENTS]
    expected = max(2 * m * n * k / 6e14, 2 * n * k / 3e12)
    repeats = max(1, round(LEAST / expected / copies))
    graphs = [graph_of(call, copies, repeats) for call in calls]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, found in zip(graphs, taken, strict=True):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / (copies * repeats))
    return [median(found) for found in taken]


def main() -> None:
    """Print the table."""
    given = parser().parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, BF16, microseconds")
    names = ("plain", *(f"{count} segments" for count in SEGMENTS[1:]))
    print(
        "| N | K | M | cuBLAS | " + " | ".join(names) + " | " + " | ".join(f"{name} / cuBLAS" for name in names) + " |"
    )
    print("|" + " ---: |" * (4 + 2 * len(names)))
    for n, k in SHAPES:
        for m in given.rows:
            first, *ours = times(m, n, k, given.gradient)
            cells = [f"{first:.1f}", *(f"{time:.1f}" for time in ours), *(f"{time / first:.2f}" for time in ours)]
            print(f"| {n} | {k} | {m} | " + " | ".join(cells) + " |", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
