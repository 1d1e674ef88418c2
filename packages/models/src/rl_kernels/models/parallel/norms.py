"""Norms whose rows are cut over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import all_gather
from rl_kernels.core.saved import save


class _Norm(NamedTuple):
    """A norm of rows that are cut over ranks."""

    module: nn.Module
    forward: Callable[..., torch.Tensor]
    """The forward of the module's class."""
    group: ProcessGroup
    dim: int
    """The dim of the rows that is cut."""
    names: tuple[str, ...]
    """Names of the module's parameters."""


def norm_of_part(
    module: nn.Module, forward: Callable[..., torch.Tensor], x: torch.Tensor, group: ProcessGroup, dim: int
) -> torch.Tensor:
    """Return the norm of rows that are cut over ranks along ``dim``.

    The gradient of its weight is a sum over all rows in their global order, so backward gathers the rows and their
    gradients; it has the bits of one process on every rank.

    Args:
        module: a norm with a weight, and maybe a bias.
        forward: the forward of its class.
        x: the rows of this rank.
        group: the ranks.
        dim: the dim of ``x`` that is cut.
    """
    parameters = {name: value for name, value in module.named_parameters(recurse=False)}
    norm = _Norm(module, forward, group, dim, tuple(parameters))
    result: torch.Tensor = _CutNorm.apply(x, norm, *parameters.values())
    return result


class _CutNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: _Norm, *parameters: torch.Tensor) -> torch.Tensor:
        save(ctx, x, *parameters)
        # Not saved for backward: main_grad may change in place between this call and its backward pass.
        ctx.norm, ctx.main_grads = norm, [getattr(value, "main_grad", None) for value in parameters]
        return _run(norm, x, parameters)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        norm: _Norm = ctx.norm
        dx = None
        if ctx.needs_input_grad[0]:
            (dx,) = _gradients(norm, x, [value.detach() for value in parameters], upstream, of_x=True)
        if not any(ctx.needs_input_grad[2:]):
            return dx, None, *[None] * len(parameters)
        rows, upstreams = (all_gather(value, norm.group, norm.dim) for value in (x, upstream))
        leaves = [_leaf(value, buffer) for value, buffer in zip(parameters, ctx.main_grads, strict=True)]
        return dx, None, *_gradients(norm, rows, leaves, upstreams, of_x=False)


def _leaf(parameter: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor:
    leaf = parameter.detach().requires_grad_()
    if main_grad is not None:
        leaf.main_grad = main_grad  # type: ignore[attr-defined]
    return leaf


def _gradients(
    norm: _Norm, x: torch.Tensor, parameters: list[torch.Tensor], upstream: torch.Tensor, *, of_x: bool
) -> tuple[torch.Tensor | None, ...]:
    with torch.enable_grad():
        rows = x.detach().requires_grad_(of_x)
        result = _run(norm, rows, parameters)
        return torch.autograd.grad(result, [rows] if of_x else parameters, upstream, allow_unused=True)


def _run(norm: _Norm, x: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    # A copy with other parameters; no hook runs, because the forward of the class is called directly.
    twin = copy.copy(norm.module)
    twin.__dict__["_parameters"] = dict(zip(norm.names, parameters, strict=True))
    return norm.forward(twin, x)
