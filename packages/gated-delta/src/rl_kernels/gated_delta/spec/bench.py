"""The benchmark of gated_delta_rule: models' shapes, the work of the recurrence, and the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.testing import Case
from rl_kernels.gated_delta import reference
from rl_kernels.lab.bench.definition import GOALS, HOST, SMALL, Benchmark, Pass, Peer, Shape, Work, forward_and_backward, plain

QWEN3_NEXT = (16, 32, 128, 128)
"""Heads of keys and values, and their sizes, of Qwen3-Next and Qwen3.5-9B."""
# Token by token in Python: seconds for these.
LOOP = frozenset({"recurrence"})
SETS = {
    GOALS: tuple(
        Shape((batch, tokens, *QWEN3_NEXT), without=LOOP) for batch, tokens in ((4, 2048), (2, 8192), (1, 16384))
    ),
    HOST: (Shape((1, 64, *QWEN3_NEXT), note="one chunk", without=LOOP),),
    SMALL: (Shape((1, 128, 2, 4, 64, 64)), Shape((2, 65, 1, 2, 32, 16), note="ragged")),
}


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the output token by token in plain PyTorch, in the dtype of sums of the operands."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group, scale = v.shape[2] // q.shape[2], q.shape[3] ** -0.5
    q, k = ((x * (x.square().sum(-1, keepdim=True) + reference.EPS).rsqrt()).to(v.dtype) for x in (q.to(wide), k.to(wide)))
    q, k = (x.to(wide).repeat_interleave(group, 2) for x in (q, k))
    state = v.new_zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=wide)
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].to(wide).exp()
        u = beta[:, t, :, None].to(wide) * (v[:, t].to(wide) - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * u[:, :, None]
        rows.append((q[:, t, :, None] @ state)[:, :, 0])
    return (scale * torch.stack(rows, 1)).to(v.dtype)


def fla() -> Callable[..., torch.Tensor]:
    """Import flash-linear-attention's chunked function."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call(*operands: Any) -> torch.Tensor:
        out: torch.Tensor = chunk_gated_delta_rule(*operands, use_qk_l2norm_in_kernel=True)[0]
        return out

    return lambda q, k, v, g, beta: call(q, k, v, g, beta)


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Count three products of a row and the state for each token forward, and the bytes of the operands and output."""
    batch, tokens, key_heads, heads, size, value_size = shape.sizes
    sizes = {"batch": batch, "tokens": tokens, "key_heads": key_heads, "group": heads // key_heads}
    case = Case(shape.label, sizes | {"key_size": size, "value_size": value_size}, shape.options)
    rows = batch * tokens
    moved = rows * (itemsize * (2 * key_heads * size + 2 * heads * value_size) + 8 * heads)
    product = 2.0 * rows * heads * size * value_size
    return forward_and_backward(case, Work(moved, 3 * product), Work(3 * moved, 9 * product))


BENCH = Benchmark(
    shape=("B", "T", "Hk", "Hv", "Dk", "Dv"),
    sets=SETS,
    passes=passes,
    peers={
        "recurrence": plain(recurrence, "token by token"),
        "fla": Peer(fla, "fla-core", note="chunked kernels of flash-linear-attention"),
    },
)
