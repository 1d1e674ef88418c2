"""The benchmark of det_gemm: the three products of a linear layer in models' shapes, against PyTorch and others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rl_kernels.core.testing import Case
from rl_kernels.det_gemm.spec.cases import COLUMNS, DW, LINEAR, ROWS
from rl_kernels.lab.bench.definition import (
    GOALS,
    HOST,
    SMALL,
    Benchmark,
    Pass,
    Peer,
    Shape,
    Work,
    forward_and_backward,
    plain,
)
from rl_kernels.lab.bench.peers import no_split_k, tf32
from rl_kernels.lab.check.rows import RowLayout

WEIGHTS = ((4096, 4096), (12288, 4096), (4096, 12288), (24576, 4096), (4096, 14336))
"""N and K of the table of goals; SHARD is the skinny one."""
SHARD = (1280, 8192)
DECODE, TRAIN = "M <= 32", "M >= 1024"
ROWS_OF_GOALS, ROWS_OF_PROJECTIONS = (1, 8, 32, 128, 1024, 4096), (1, 8, 32, 128, 1024, 4096, 8192)


def _shape(m: int, n: int, k: int, note: str = "") -> Shape:
    kind = DECODE if m <= 32 else TRAIN if m >= 1024 else f"M = {m}"
    return Shape((m, n, k), note=note, group=f"{kind}, N < 4096" if n < 4096 else kind)


def projections(hidden: int, heads: int, kv_heads: int, between: int, vocab: int) -> list[tuple[str, int, int]]:
    """Return name, N and K of each linear layer of a model with a head size of 128."""
    return [
        ("qkv", (heads + 2 * kv_heads) * 128, hidden),
        ("o", hidden, heads * 128),
        ("gate_up", 2 * between, hidden),
        ("down", hidden, between),
        ("lm_head", vocab, hidden),
    ]


MODELS = {
    "Qwen3-8B": projections(4096, 32, 8, 12288, 151936),
    "Llama-3.1-8B": projections(4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": projections(8192, 64, 8, 28672, 128256),
}
LAYER = {"layer": True}
"""Times a call of the layer with its gradients instead of its three products one by one."""
PRODUCTS = frozenset({"tf32", "cublas-no-split-k", "batch-invariant", "fixed-tile"})
SETS = {
    GOALS: (
        *(_shape(m, n, k) for n, k in WEIGHTS for m in ROWS_OF_GOALS),
        *(_shape(m, *SHARD, "shard") for m in ROWS_OF_GOALS),
        Shape((257, 129, 4104), note="ragged"),
    ),
    "projections": tuple(
        _shape(m, n, k, f"{model} {name}")
        for model, layers in MODELS.items()
        for name, n, k in layers
        for m in ROWS_OF_PROJECTIONS
    ),
    HOST: (Shape((1, 1024, 1024), LAYER, "one token", without=PRODUCTS),),
    SMALL: (
        _shape(1, 1024, 1024),
        _shape(16, 1024, 1024),
        _shape(64, 896, 4864, "Qwen2.5-0.5B down"),
        _shape(256, 1024, 1024),
        Shape((7, 129, 513), note="ragged"),
    ),
}


def products(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function with the arguments of det_gemm and det_gemm_dw that calls a product ``left @ right``."""

    def call(a: torch.Tensor, b: torch.Tensor | None = None, dc: torch.Tensor | None = None) -> torch.Tensor:
        return function(a.t(), dc) if b is None else function(a, b)

    return call


def eager(
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    dc: torch.Tensor | None = None,
    *,
    x: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return PyTorch's product, or its linear layer."""
    if x is not None and weight is not None:
        return F.linear(x, weight)
    assert a is not None
    return products(torch.matmul)(a, b, dc)


def in_tf32() -> Callable[..., torch.Tensor]:
    """Return the product of FP32 matrices in TF32; it needs a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs a GPU")

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype != torch.float32:
            raise ValueError(f"TF32 is for products of FP32, got {left.dtype}")
        return left @ right

    return products(product)


def without_split_k() -> Callable[..., torch.Tensor]:
    """Return the product for cuBLASLt; it needs a CUDA build."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("no CUDA: cuBLASLt is not here")
    return products(torch.matmul)


def batch_invariant() -> Callable[..., torch.Tensor]:
    """Import the product of batch_invariant_ops."""
    from batch_invariant_ops import matmul_persistent

    return products(matmul_persistent)


def fixed_tile() -> Callable[..., torch.Tensor]:
    """Return core's Triton product with one persistent tile for all shapes; it needs a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs a GPU")
    from rl_kernels.core.triton_lib.gemm import Product
    from rl_kernels.core.triton_lib.schedule import Schedule

    tile = Schedule(128, 128, 64, 8, 3, persistent=True)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = left.new_empty((left.shape[0], right.shape[1]))
        Product(left, right, out, schedule=tile)(left, right, out)
        return out

    return products(product)


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Time the product of a linear layer and the two of its backward: as many operations, in other layouts.

    With ``LAYER``: the layer's call, without and with its gradients.
    """
    m, n, k = shape.sizes
    work = Work((m * k + n * k + m * n) * itemsize, 2.0 * m * n * k)
    if "layer" in shape.options:
        layer = Case(f"{shape.label} layer", {"m_dim": m, "n_dim": n, "k_dim": k}, function=LINEAR)
        return forward_and_backward(layer, work, Work(3 * work.bytes, 3 * work.flops))

    def case(name: str, sizes: tuple[int, int, int], function: str = "", columns: tuple[str, ...] = ()) -> Pass:
        named = dict(zip(("m_dim", "n_dim", "k_dim"), sizes, strict=True))
        options = {COLUMNS: columns, **shape.options}
        return Pass(Case(f"{shape.label} {name}", named, options, function, grad=False), work)

    # The weight lies as [N, K]: the forward reads it column by column, dA = dC @ weight row by row.
    return {
        "forward": case("forward", (m, n, k), columns=("b",)),
        "dA": case("dA", (m, k, n)),
        "dW": case("dW", (m, n, k), DW),
    }


BENCH = Benchmark(
    shape=("M", "N", "K"),
    sets=SETS,
    passes=passes,
    peers={
        "eager": plain(eager, "torch.matmul and F.linear as they come; cuBLAS on an NVIDIA GPU"),
        "tf32": Peer(
            in_tf32,
            note="torch.matmul in TF32: operands of 10 bits in place of FP32's 23",
            dtypes=("fp32",),
            around=tf32,
        ),
        "cublas-no-split-k": Peer(
            without_split_k,
            note="torch.matmul by cuBLASLt, its workspace starved, reductions of split-K disallowed",
            around=no_split_k,
            environment={"CUBLASLT_WORKSPACE_SIZE": "1"},
        ),
        "batch-invariant": Peer(batch_invariant, "batch_invariant_ops"),
        "fixed-tile": Peer(fixed_tile, note="one tile, 128 x 128 x 64, for every shape, as batch_invariant_ops has it"),
    },
    rows={"": ROWS, DW: RowLayout(arguments={"a": 1, "dc": 1}, results=frozenset(), functions=frozenset({DW}))},
)
