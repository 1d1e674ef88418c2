"""Logits of a few rows from a CUDA graph: a copy and a replay in a step, in place of launches and allocations.

A decode step of a few sequences waits for the host. The graph holds the launches of ``linear_logits`` for a number of
rows, and their memory. Fewer rows are padded: a row depends on itself alone, so that no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rl_kernels.core.torchlib.observed import is_traced, values_hidden, without_modes
from rl_kernels.linear_logp import LinearLogits, linear_logits

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a graph; more keep the GPU busy for longer than a launch takes."""


class _Graph(NamedTuple):
    """The graph for up to so many rows.

    Attributes:
        places: addresses of the weight and the bias that it reads.
        replay: runs it.
        inputs: for each number of rows, from 1 on, the view ``[rows, D]`` of what it reads.
        results: for each number of rows, views of what it writes.
    """

    places: tuple[int, int]
    replay: Callable[[], object]
    inputs: list[torch.Tensor]
    results: list[LinearLogits]


class GraphedLogits:
    """Computes ``linear_logits`` of a head whose weight stays where it is; results last until the next call."""

    def __init__(self) -> None:
        """Start without graphs: each is captured when it is first needed."""
        self._graphs: dict[int, _Graph] = {}
        self._sizes = [next(size for size in SIZES if size >= rows) for rows in range(1, SIZES[-1] + 1)]
        self._pool: Any = None

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearLogits:
        """Return ``linear_logits(hidden, weight, bias)``, of rows ``hidden[N, D]``."""
        rows = len(hidden)
        if not 0 < rows <= len(self._sizes) or hidden.dtype != weight.dtype or not can_replay(hidden):
            return linear_logits(hidden, weight, bias)
        size, places = self._sizes[rows - 1], (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
        graph = self._graphs.get(size)
        if graph is None or graph.places != places:
            graph = self._graphs[size] = self._captured(hidden, weight, bias, size, places)
        graph.inputs[rows - 1].copy_(hidden)
        graph.replay()
        return graph.results[rows - 1]

    def _captured(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        size: int,
        places: tuple[int, int],
    ) -> _Graph:
        """Capture the launches for a number of rows."""
        with without_modes():
            copy = hidden.new_zeros(size, hidden.shape[1])
            if self._pool is None:
                self._pool = new_pool()
            result, replay = captured(lambda: linear_logits(copy, weight, bias), self._pool)
            counts = range(1, size + 1)
            result = result._replace(version=None)
            views = [result._replace(logits=result.logits[:rows], norm=result.norm[:rows]) for rows in counts]
            return _Graph(places, replay, [copy[:rows] for rows in counts], views)


def can_replay(hidden: torch.Tensor) -> bool:
    """Say whether a graph can be replayed now: not under a compiler or a mode, and not while one is captured."""
    return hidden.is_cuda and hidden.dim() == 2 and not values_hidden(hidden) and not is_traced()


def new_pool() -> Any:
    """Return a pool of memory for graphs that are replayed one after the other."""
    return torch.cuda.graph_pool_handle()


def captured(run: Callable[[], LinearLogits], pool: Any) -> tuple[LinearLogits, Callable[[], object]]:
    """Capture what a function launches; return its result, and the function that runs it again."""
    # Prepares and loads what may not be loaded while a graph is captured.
    run()
    graph = torch.cuda.CUDAGraph()
    # vLLM waits for copies in another thread meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return result, graph.replay
