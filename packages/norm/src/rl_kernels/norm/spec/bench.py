"""The benchmark of rms_norm: shapes, the bytes that must move, and the peers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case
from rl_kernels.lab.bench.definition import (
    GOALS,
    HOST,
    SMALL,
    Benchmark,
    Pass,
    Peer,
    Shape,
    Work,
    compiled,
    forward_and_backward,
    plain,
)
from rl_kernels.norm.results import NormAndSum
from rl_kernels.norm.spec.cases import ADDED, GATED
from rl_kernels.norm.spec.transforms import ROWS

COMPILE = frozenset({"compile"})
LIBRARIES = frozenset({"torch", "liger", "quack"})
SETS = {
    GOALS: (
        Shape((8192, 4096)),
        Shape((2048, 4096)),
        Shape((64, 8192), note="decode"),
        Shape((262144, 128), note="heads"),
        Shape((8192, 4096), ADDED, "with a residual", without=frozenset({"torch"})),
        Shape((262144, 128), GATED, "gated heads", without=LIBRARIES),
        Shape((4097, 3000), note="ragged", without=COMPILE),
    ),
    HOST: (Shape((1, 4096)), Shape((1, 4096), ADDED, "with a residual", without=frozenset({"torch"}))),
    SMALL: (
        Shape((512, 1024), without=COMPILE),
        Shape((8, 4096), note="decode", without=COMPILE),
        Shape((256, 1024), ADDED, "with a residual", without=COMPILE | {"torch"}),
        Shape((2048, 128), GATED, "gated heads", without=COMPILE | LIBRARIES),
    ),
}
EPS = 1e-6


def eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> object:
    """Compute the norm as Llama's module in transformers does, with a gate as Qwen3-Next's."""
    total = x if residual is None else x + residual
    row = total.float()
    row = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + EPS)
    output = weight * row.to(x.dtype)
    if gate is not None:
        output = (output * F.silu(gate.float())).to(x.dtype)
    return output if residual is None else NormAndSum(output, total)


def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute PyTorch's own RMSNorm."""
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def liger() -> Callable[..., object]:
    """Import Liger's norms."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_rms_norm

    def call(x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None) -> object:
        if residual is None:
            return liger_rms_norm(x, weight, EPS, 0.0, "llama", False)
        return NormAndSum(*liger_fused_add_rms_norm(x, residual, weight, EPS, 0.0, "llama", False))

    return call


def quack() -> Callable[..., object]:
    """Import quack's norm."""
    from quack.rmsnorm import rmsnorm

    def call(x: torch.Tensor, weight: torch.Tensor) -> object:
        return rmsnorm(x, weight, eps=EPS)

    return call


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Count bytes: forward reads rows and writes norms; backward reads rows and gradients and writes gradients.

    With a residual, sums and their gradients are read and written too; a gate is read twice, its gradient written.
    """
    rows, width = shape.sizes
    case = Case(shape.label, {"batch": rows, "hidden": width}, shape.options)
    forward, both = (4, 8) if shape.options == ADDED else (3, 8) if shape.options == GATED else (2, 5)
    size = rows * width * itemsize
    return forward_and_backward(case, Work(forward * size), Work(both * size))


BENCH = Benchmark(
    shape=("N", "D"),
    sets=SETS,
    passes=passes,
    peers={
        "eager": plain(eager, "Llama's or Qwen3-Next's module in transformers"),
        "compile": compiled(eager),
        "torch": plain(library, "F.rms_norm"),
        "liger": Peer(liger, "liger-kernel"),
        "quack": Peer(quack, "quack-kernels"),
    },
    rows={"": ROWS},
)
