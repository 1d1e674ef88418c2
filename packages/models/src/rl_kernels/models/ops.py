"""What a model needs beside products, as ops of torch: a compiled model gets their bits, not those of its compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core import torchlib
from rl_kernels.core.dispatch import choose
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.torchlib import first_order, no_lost_derivatives
from rl_kernels.det_gemm import op
from rl_kernels.models.norm import Form

SCHEMAS = {
    "norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred, float offset, bool early, "
    "str backend) -> Tensor",
    "norm_backward": "(Tensor grad, Tensor x, Tensor? weight, float eps, bool centred, float offset, "
    "str backend) -> (Tensor, Tensor)",
}


def _fake_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: Any, eps: Any, c: Any, o: Any, early: bool) -> Any:
    dtype = torch.promote_types(x.dtype, weight.dtype) if early and weight is not None else x.dtype
    return x.new_empty(x.shape, dtype=dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "norm": _fake_norm,
    "norm_backward": lambda grad, x, *_: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)),
}

NATIVE = "native"
PARTS = Operator(
    name="det_gemm_model",
    package="rl_kernels.models",
    summary="norms whose rows do not depend on the batch",
    shape=(),
    rows=frozenset(),
    schemas=SCHEMAS,
    fakes=FAKES,
    backends=(Backend(NATIVE, "rl_kernels.models.norm", {"cpu": INVARIANT, "cuda": INVARIANT}),),
    describe=Call.of,
)

_ops = torchlib.define(PARTS)


def norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, form: Form
) -> torch.Tensor:
    """Return a norm of ``x[..., D]`` as ``models.norm`` describes it; differentiable once."""
    no_lost_derivatives("norm of invariant", x, weight, bias)
    args = (x, weight, bias, float(eps), *form)
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in args[:3]):
        return _Norm.apply(*args)
    return _ops["norm"](*args, NATIVE)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, centred: bool, offset: float, early: bool) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.numbers, ctx.bias_dtype = (eps, centred, offset), None if bias is None else bias.dtype
        return _ops["norm"](x, weight, bias, eps, centred, offset, early, NATIVE)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, terms = first_order(_ops["norm_backward"], grad, x, weight, *ctx.numbers, NATIVE)
        dweight = _over_rows(terms).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = _over_rows(grad.float()).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx if ctx.needs_input_grad[0] else None, dweight, dbias, None, None, None, None


def _over_rows(terms: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``terms[..., D]`` over the rows: the chain of a weight gradient, 16 rows a step."""
    rows = terms.flatten(0, -2) if terms.ndim > 1 else terms[None]
    ones = rows.new_ones(rows.shape[0], 1)
    backend = choose(op.OPERATOR, op.describe_dw(ones, rows)).name
    return first_order(op.ops["weight_gradient"], ones, rows, rows.dtype, backend)[0]
