"""The benchmark of causal_conv1d: shapes, the bytes that must move, and the peers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case
from rl_kernels.gated_delta.conv_inputs import PAST, TAPS
from rl_kernels.gated_delta.results import Convolved
from rl_kernels.gated_delta.spec.conv_cases import STATE
from rl_kernels.lab.bench.definition import (
    FORWARD,
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

COMPILE = frozenset({"compile"})
SETS = {
    GOALS: (
        Shape((4, 2048, 8192)),
        Shape((1, 16384, 8192)),
        Shape((64, 1, 8192), STATE, "decode"),
        Shape((3, 1001, 3000), note="ragged", without=COMPILE),
    ),
    HOST: (Shape((1, 1, 1024)), Shape((1, 1, 1024), STATE, "decode")),
    SMALL: (Shape((2, 256, 512), without=COMPILE), Shape((8, 1, 512), STATE, "decode", without=COMPILE)),
}


def eager(
    x: torch.Tensor, weight: torch.Tensor, *, state: torch.Tensor | None = None, return_state: bool = False
) -> torch.Tensor | Convolved:
    """Compute the convolution as Qwen3-Next's module in transformers does, on channels first."""
    inputs = x.mT if state is None else torch.cat((state, x), 1).mT
    padding = PAST if state is None else 0
    out = F.conv1d(inputs, weight[:, None], padding=padding, groups=x.shape[2])[..., : x.shape[1]]
    out = F.silu(out).mT
    return Convolved(out, inputs[..., -PAST:].mT.contiguous()) if return_state else out


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Count bytes: forward reads x and writes the output; backward reads x and a gradient and writes a gradient.

    Decoding reads a state and writes one, and has no backward.
    """
    batch, count, width = shape.sizes
    case = Case(shape.label, {"batch": batch, "seq": count, "width": width}, shape.options)
    rows, weight = batch * count * width * itemsize, width * TAPS * itemsize
    if shape.options:
        return {FORWARD: Pass(case, Work(2 * rows + 2 * batch * PAST * width * itemsize + weight))}
    return forward_and_backward(case, Work(2 * rows + weight), Work(5 * rows + 3 * weight))


BENCH = Benchmark(
    shape=("B", "T", "D"),
    sets=SETS,
    passes=passes,
    peers={"eager": plain(eager, "Qwen3-Next's module in transformers"), "compile": compiled(eager)},
    tokens=lambda shape: shape.sizes[0] * shape.sizes[1],
)
