"""The launches of a decoder layer for one token of each sequence, prepared for one kind of input and weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Launches
from rl_kernels.core.dispatch import choose, remembered
from rl_kernels.core.layout import ALIGNED
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.det_gemm.arguments import prepare_linear
from rl_kernels.models.fused import conditions
from rl_kernels.models.fused.gate import launch_of as gate_launch
from rl_kernels.models.fused.rotary import launch_of as rotary_launch
from rl_kernels.norm.op import OPERATOR as NORM
from rl_kernels.norm.op import describe
from rl_kernels.norm.op import ops as norms

PRODUCTS = 7
"""Number of the products of a layer."""


class Plan(NamedTuple):
    """The launches of a step, and the shapes of rotated queries and keys.

    Attributes:
        norms: before the attention, of the sum behind it, and of heads of queries and keys, if they are normalized.
        products: of q, k, v, o, gate, up and down.
    """

    norms: tuple[Launches, ...]
    products: tuple[Launches, ...]
    rotate: Launch
    multiply: Launch
    q: tuple[int, ...]
    k: tuple[int, ...]


@remembered
def prepare(
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
    forms: tuple[Any, ...],
    *operands: Any,
) -> Plan | tuple[()]:
    """Prepare the launches of a step; return () if the operands are not those of plain matrices of one dtype.

    forms: of the norms; operands: weights and biases of the products, weights and epsilons of the norms.
    """
    weights, biases, rest = operands[:PRODUCTS], operands[PRODUCTS : 2 * PRODUCTS], operands[2 * PRODUCTS :]
    scales, epsilons = rest[: len(forms)], rest[len(forms) :]
    tensors = (hidden, cos, sin, *scales, *weights)
    if not all(type(epsilon) is float for epsilon in epsilons):
        return ()
    if not conditions.fits(*tensors) or not all(w.ndim == 2 for w in weights):
        return ()
    # Norms copy other rows first, because alignment may change their bits.
    if not hidden.is_contiguous() or hidden.data_ptr() % ALIGNED:
        return ()
    batch, _, size = hidden.shape
    widths = weights[0].shape[0], weights[1].shape[0], weights[4].shape[0]
    shapes = [(widths[0], size), (widths[1], size), (widths[1], size), (size, widths[0])]
    shapes += [(widths[2], size), (widths[2], size), (size, widths[2])]
    if [tuple(w.shape) for w in weights] != shapes or widths[0] % head_dim or widths[1] % head_dim or not batch:
        return ()
    if cos.shape[1:] != (1, head_dim) or cos.shape[0] not in (1, batch) or head_dim % 2:
        return ()
    if (sin.shape, sin.stride()) != (cos.shape, cos.stride()) or cos.stride(-1) != 1:
        return ()
    heads, kv_heads = widths[0] // head_dim, widths[1] // head_dim
    inputs = [
        hidden.new_empty(batch * count, width) for count, width in ((1, size), (heads, head_dim), (kv_heads, head_dim))
    ]
    if [tuple(scale.shape) for scale in scales] != [(size,), (size,), (head_dim,), (head_dim,)][: len(scales)]:
        return ()
    normalize = []
    for place, rows in enumerate([inputs[0], *inputs][: len(forms)]):
        op, given = (norms["forward_sum"], (rows, rows)) if place == 1 else (norms["forward"], (rows,))
        arguments = (*given, scales[place], None, epsilons[place], *forms[place])
        normalize.append(op.ready(*arguments, choose(NORM, describe(rows)).name).launches)
    products = [
        prepare_linear(hidden.new_empty(batch, w.shape[1]), w, b, None, 1, 1, None).launches
        for w, b in zip(weights, biases, strict=True)
    ]
    if None in normalize or None in products:
        return ()
    q, k = (hidden.new_empty(batch, 1, count, head_dim).transpose(1, 2) for count in (heads, kv_heads))
    return Plan(
        tuple(normalize),  # type: ignore[arg-type]
        tuple(products),  # type: ignore[arg-type]
        rotary_launch(q, k, cos, q, k),
        gate_launch(batch * widths[2]),
        (batch, 1, heads, head_dim),
        (batch, kv_heads, 1, head_dim),
    )
