"""rms_norm and layer_norm in PyTorch, for any device: the sum of a row is ``rowwise.sums.row_sum``.

The gradients of weight and bias are sums over the rows: a tree within each 16 rows, then the sums of these in ascending
order, on top of the values in the buffer.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.silu import silu, silu_and_slope
from rl_kernels.core.rowwise.sums import row_sum, sum_over_rows
from rl_kernels.norm.results import result_dtype


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm ``[N, D]``, stats ``[2, N]``)."""
    row, stats = _norm(x, weight, bias, eps, centered, offset, cast_first)
    return row.to(result_dtype(x, weight, cast_first)).contiguous(), stats


def forward_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm times ``silu(gate)`` ``[N, D]``, stats ``[2, N]``)."""
    row, stats = _norm(x, weight, *options)
    cast_first = options[-1]
    if cast_first:
        row = row.to(result_dtype(x, weight, cast_first)).to(row.dtype)
    return row.mul_(silu(gate.to(row.dtype))).to(x.dtype).contiguous(), stats


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm before its last rounding, and stats."""
    row = x.to(compute_dtype(x.dtype))
    mean = _mean(row) if centered else row.new_zeros(len(row))
    if centered:
        row = row - mean[:, None]
    inverse = _mean(row * row).add_(eps).sqrt_().reciprocal_()
    row = row * inverse[:, None]
    if cast_first and weight is not None:
        row = row.to(x.dtype).to(row.dtype)
    if weight is not None:
        row *= _scale(weight, offset, row.dtype)
    if bias is not None:
        row += bias.to(row.dtype)
    return row, torch.stack((inverse, mean))


def _scale(weight: torch.Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) + offset if offset else weight.to(dtype)


def forward_sum(
    x: torch.Tensor, residual: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (norm ``[N, D]``, ``x + residual``, stats ``[2, N]``)."""
    dtype = compute_dtype(x.dtype)
    total = (x.to(dtype) + residual.to(dtype)).to(x.dtype).contiguous()
    output, stats = forward(total, *options)  # type: ignore[arg-type]
    return output, total, stats


def backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx ``[N, D]``, dweight ``[D]``, dbias ``[D]``), from the arguments of ``terms_of`` and two flags."""
    *saved, needs_weight, needs_bias = arguments
    dx, terms, upstream = terms_of(*saved)
    return dx, _gradient(terms, needs_weight), _gradient(upstream, needs_bias)


def backward_into(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradient of the weight to ``main_grad[D]``; return (dx, dbias)."""
    *saved, main_grad, needs_bias = arguments
    dx, terms, upstream = terms_of(*saved)
    main_grad.copy_(sum_over_rows(terms, main_grad))
    return dx, _gradient(upstream, needs_bias)


def backward_gated(
    gate: torch.Tensor, grad: torch.Tensor, grad_sum: torch.Tensor | None, *saved: Any
) -> tuple[torch.Tensor, ...]:
    """Return (dx, dgate ``[N, D]``, dweight, dbias)."""
    of_norm, dgate = _through_gate(gate, grad, *saved[:5])
    dx, *rest = backward(of_norm, grad_sum, *saved)
    return dx, dgate, *rest


def backward_gated_into(
    gate: torch.Tensor, grad: torch.Tensor, grad_sum: torch.Tensor | None, *saved: Any
) -> tuple[torch.Tensor, ...]:
    """Add the gradient of the weight to ``main_grad[D]``; return (dx, dgate, dbias)."""
    of_norm, dgate = _through_gate(gate, grad, *saved[:5])
    dx, dbias = backward_into(of_norm, grad_sum, *saved)
    return dx, dgate, dbias


def _through_gate(
    gate: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    centered: bool,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the norm, not rounded, and of the gate."""
    factor, slope = silu_and_slope(gate.to(stats.dtype))
    norm, upstream = _scaled(x, stats, centered), grad.to(stats.dtype)
    if weight is not None:
        norm = norm * _scale(weight, offset, stats.dtype)
    return upstream * factor, slope.mul_(norm.mul_(upstream)).to(gate.dtype).contiguous()


def _scaled(x: torch.Tensor, stats: torch.Tensor, centered: bool) -> torch.Tensor:
    inverse, mean = stats[0, :, None], stats[1, :, None]
    return (x.to(stats.dtype) - mean).mul_(inverse) if centered else x.to(stats.dtype) * inverse


def _gradient(terms: torch.Tensor, is_needed: bool) -> torch.Tensor:
    """Return the sum of ``terms[N, D]`` over the rows, empty if it is not needed."""
    return sum_over_rows(terms, terms.new_zeros(terms.shape[1])) if is_needed else terms.new_empty(0)


def terms_of(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    centered: bool,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx, terms of dweight, terms of dbias), the terms not summed over the rows."""
    upstream = grad.to(stats.dtype)
    scaled = _scaled(x, stats, centered)
    pull = upstream if weight is None else upstream * _scale(weight, offset, stats.dtype)
    dx = pull - scaled * _mean(pull * scaled)[:, None]
    if centered:
        dx -= _mean(pull)[:, None]
    dx *= stats[0, :, None]
    if grad_sum is not None:
        dx += grad_sum.to(stats.dtype)
    return dx.to(x.dtype).contiguous(), upstream.mul(scaled), upstream


def _mean(x: torch.Tensor) -> torch.Tensor:
    return row_sum(x).div_(x.shape[-1])
