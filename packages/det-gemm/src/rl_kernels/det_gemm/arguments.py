"""Checks of arguments and the choice of a backend, remembered for calls of one kind."""

from __future__ import annotations

import torch

from rl_kernels.core import chains
from rl_kernels.core import validate as check
from rl_kernels.core.calls import Ready
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.det_gemm import segments
from rl_kernels.det_gemm.autograd import raw_product
from rl_kernels.det_gemm.op import OPERATOR, describe, describe_dw, ops


@remembered
def prepare_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
    backend: str | None,
    k_segments: int,
    dx_segments: int,
) -> Ready:
    """Check the arguments of ``det_gemm``, choose a backend, and prepare the forward pass."""
    check.tensor("a", a, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("b", b, check.HALF_AND_FLOAT, ndim=2)
    check.shape("b", b, (a.shape[1], b.shape[1]), "K of a by N")
    check.same_dtype(a=a, b=b)
    check.same_device(a=a, b=b)
    _validate_options(out_dtype, backend)
    segments.validate(k_segments=k_segments, dx_segments=dx_segments)
    name = choose(OPERATOR, describe(a, b), backend).name
    op, args = raw_product(a, b.t(), None, out_dtype or a.dtype, k_segments)
    return op.ready(*args, name)


@remembered
def prepare_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str | None,
    k_segments: int,
    dx_segments: int,
    join_tokens: int | None,
) -> Ready:
    """Check the arguments of ``det_linear``, choose a backend, and prepare the forward pass."""
    name = choose_for_linear(x, weight, bias, backend, k_segments, dx_segments, join_tokens)
    op, args = raw_product(x, weight, bias, x.dtype, k_segments)
    return op.ready(*args, name)


@remembered
def choose_for_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str | None,
    k_segments: int = 1,
    dx_segments: int = 1,
    join_tokens: int | None = None,
) -> str:
    """Check the arguments of a linear layer, and return the name of the backend that is chosen for it."""
    check.tensor("x", x, check.HALF_AND_FLOAT, least=1)
    check.tensor("weight", weight, check.HALF_AND_FLOAT, ndim=2)
    check.shape("weight", weight, (weight.shape[0], x.shape[-1]), "N by the last dim of x")
    if bias is not None:
        check.tensor("bias", bias, check.HALF_AND_FLOAT, ndim=1)
        check.shape("bias", bias, weight.shape[:1], "the first dim of weight")
    check.same_device(x=x, weight=weight, bias=bias)
    check.backend_name(backend)
    check.same_dtype(x=x, weight=weight, bias=bias)
    segments.validate(k_segments=k_segments, dx_segments=dx_segments)
    chains.validate(join_tokens)
    return choose(OPERATOR, describe(x, weight.t()), backend).name


@remembered
def prepare_dw(
    a: torch.Tensor,
    dc: torch.Tensor,
    accumulate_into: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    join_tokens: int | None,
    backend: str | None,
) -> Ready:
    """Check the arguments of ``det_gemm_dw``, choose a backend, and prepare a sum that needs no buffer."""
    check.tensor("a", a, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("dc", dc, check.HALF_AND_FLOAT, ndim=2)
    check.shape("dc", dc, (a.shape[0], dc.shape[1]), "M of a by N")
    check.same_dtype(a=a, dc=dc)
    check.same_device(a=a, dc=dc)
    _validate_options(out_dtype, backend)
    chains.validate(join_tokens)
    if accumulate_into is not None:
        check.tensor("accumulate_into", accumulate_into, (torch.float32,))
        check.shape("accumulate_into", accumulate_into, (a.shape[1], dc.shape[1]), "K of a by N of dc")
        check.same_device(a=a, accumulate_into=accumulate_into)
        if out_dtype not in (None, torch.float32):
            raise ValueError(f"out_dtype: expected None or torch.float32 with accumulate_into, got {out_dtype}")
    name = choose(OPERATOR, describe_dw(a, dc), backend).name
    if accumulate_into is not None or join_tokens is not None:
        return Ready(name)
    return ops["weight_gradient"].ready(a, dc, out_dtype or a.dtype, name)


def _validate_options(out_dtype: torch.dtype | None, backend: str | None) -> None:
    if out_dtype is not None:
        check.choice("out_dtype", out_dtype, check.HALF_AND_FLOAT)
    check.backend_name(backend)
