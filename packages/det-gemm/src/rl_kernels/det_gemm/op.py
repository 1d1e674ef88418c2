"""The registration of det_gemm with the registry and torch: schemas, fake kernels, backends, their promises.

In the raw ops all operands share one dtype and may have any strides. Rows may have several dims, which results keep, as
in ``a[..., K]``, but for the ops that write to a buffer. ``forward`` is ``a[M, K] @ weight[N, K]^T + bias[N]``,
``segmented`` is the same with K cut into ``segments`` segments of ``length`` terms, a multiple of 16 (the last ones are
shorter or empty), each a sum of its own, merged by a balanced tree before the bias; their number is a power of two up
to 8, and they hold all of K. ``weight_gradient`` is ``a[M, K]^T @ dc[M, N]``, and ``weight_gradient_into`` continues
its chain in the FP32 buffer ``out[K, N]``; ``joined_into`` adds chains of ``join_tokens`` rows to it (``chains``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core import products
from rl_kernels.core.cuda.where import cuda_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.torchlib.ops import define
from rl_kernels.core.triton_lib.launch import triton_backend

PER_CHUNK = 8
"""16-bit numbers in 16 bytes."""
SCHEMAS = {
    "forward": "(Tensor a, Tensor weight, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor",
    "segmented": (
        "(Tensor a, Tensor weight, Tensor? bias, ScalarType out_dtype, int segments, SymInt length, str backend)"
        " -> Tensor"
    ),
    "segmented_into": "(Tensor a, Tensor weight, Tensor(a!) out, int segments, int length, str backend) -> ()",
    "weight_gradient": "(Tensor a, Tensor dc, ScalarType out_dtype, str backend) -> Tensor",
    "weight_gradient_into": "(Tensor a, Tensor dc, Tensor(a!) out, str backend) -> ()",
    "joined_into": "(Tensor a, Tensor dc, Tensor(a!) out, int join_tokens, str backend) -> ()",
}

FAKES: dict[str, Callable[..., Any]] = {
    "forward": lambda a, weight, bias, out_dtype, *_: a.new_empty((*a.shape[:-1], weight.shape[0]), dtype=out_dtype),
    "segmented": lambda a, weight, bias, out_dtype, *_: a.new_empty((*a.shape[:-1], weight.shape[0]), dtype=out_dtype),
    "segmented_into": lambda a, weight, out, segments, length: None,
    "weight_gradient": lambda a, dc, out_dtype: a.new_empty((a.shape[-1], dc.shape[-1]), dtype=out_dtype),
    "weight_gradient_into": lambda a, dc, out: None,
    "joined_into": lambda a, dc, out, join_tokens: None,
}


def describe(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> Call:
    """Describe a product to the dispatcher: K, N, and how ``b[K, N]`` is stored."""
    inner, outer = b.stride()
    layout = "row" if outer == 1 else "column" if inner == 1 else "strided"
    return Call.of(a, K=b.shape[0], N=b.shape[1], layout=layout)


def describe_dw(a: torch.Tensor, dc: torch.Tensor) -> Call:
    """Describe a weight gradient by its own K and N; the number of tokens does not matter."""
    return Call.of(a, K=a.shape[1], N=dc.shape[1], layout="row")


def _limits(call: Call) -> str | None:
    if call.dtype == torch.float32:
        return "takes BF16 and FP16; IEEE products of FP32 run on triton"
    unaligned = [f"{name} = {call.traits[name]}" for name in ("K", "N") if call.traits.get(name, 0) % PER_CHUNK]
    if unaligned:
        return f"TMA needs rows that are multiples of 16 bytes, and {unaligned[0]}"
    return None


def _note(call: Call) -> str | None:
    if call.device.type != "cpu" or not {"K", "N"} <= call.traits.keys():
        return None
    is_column = call.traits.get("layout", "column") == "column"
    return products.note(call.traits["K"], call.traits["N"], call.dtype, transposed=is_column)


OPERATOR = Operator(
    name="det_gemm",
    package="rl_kernels.det_gemm",
    summary="matrix product and linear layer whose rows do not depend on the batch",
    shape=("M", "N", "K"),
    rows=frozenset({"M"}),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(
        cuda_backend(
            "cuda-sm90",
            "rl_kernels.det_gemm.backends.cuda_sm90.backend",
            archs="sm_90",
            limits=_limits,
            sources=["rl_kernels.core.cuda.gemm"],
        ),
        triton_backend("rl_kernels.det_gemm.backends.triton.backend"),
        Backend("native", "rl_kernels.det_gemm.backends.native", {"cpu": INVARIANT, "cuda": REPEATABLE}, note=_note),
    ),
    describe=describe,
    functions=("det_linear", "det_gemm_dw", "column_parallel_linear", "row_parallel_linear"),
    canary="rl_kernels.det_gemm.canary",
)

ops = define(OPERATOR)
