"""The benchmark of gated_delta_rule: shapes, minimum bytes moved, and peers."""

from __future__ import annotations

import torch

from rl_kernels.core.testing import Case
from rl_kernels.lab.bench.definition import (
    GOALS,
    HOST,
    SMALL,
    Benchmark,
    Pass,
    Shape,
    Work,
    compiled,
    forward_and_backward,
    plain,
)
from rl_kernels.gated_delta.spec.cases import ROWS

SETS = {
    GOALS: (Shape((8192, 8192)), Shape((1, 4097), note="ragged")),
    HOST: (Shape((1, 1024)),),
    SMALL: (Shape((1024, 1024), without=frozenset({"compile"})),),
}


def eager(x: torch.Tensor, y: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return the sum in plain PyTorch."""
    return x + scale * y


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Return the work of each pass: forward reads two tensors and writes one, backward reads one and writes two."""
    rows, width = shape.sizes
    case = Case(shape.label, {"batch": rows, "width": width}, {"scale": 0.5, **shape.options})
    size = rows * width * itemsize
    return forward_and_backward(case, Work(3 * size), Work(6 * size))


BENCH = Benchmark(
    shape=("N", "D"),
    sets=SETS,
    passes=passes,
    peers={"eager": plain(eager), "compile": compiled(eager)},
    rows={"": ROWS},
)
