"""Gates, rotary embedding and mixtures as custom ops, which the compiler cannot fuse: that would change bits."""

from __future__ import annotations

import torch

from rl_kernels.models.activations import gelu_tanh, silu
from rl_kernels.models.fused import gate
from rl_kernels.models.fused import rotary as rotations
from rl_kernels.models.fused.conditions import fits
from rl_kernels.models.mixtures import blocks
from rl_kernels.models.mixtures.routers import Form, routed
from rl_kernels.moe import experts


@torch.library.custom_op("rl_kernels::vllm_silu_mul", mutates_args=())
def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[..., :d]) * x[..., d:]`` of rows of ``2 d`` numbers."""
    if fits(x) and x.is_contiguous() and x.numel():
        return gate.silu_mul_of_halves(x)
    left, right = x.chunk(2, -1)
    return silu(left) * right


@torch.library.custom_op("rl_kernels::vllm_gelu_tanh_mul", mutates_args=())
def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(x[..., :d]) * x[..., d:]`` of rows of ``2 d`` numbers, GELU in its tanh form."""
    left, right = x.chunk(2, -1)
    return gelu_tanh(left) * right


@silu_mul.register_fake
@gelu_tanh_mul.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("rl_kernels::vllm_rotary", mutates_args=())
def rotary(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``query[T, H D]`` and ``key[T, Hkv D]``, rotated by the rows ``positions[T]`` of ``cos, sin[P, D]``."""
    size = cos.shape[-1]
    q, k = (x.view(x.shape[0], x.shape[1] // size, size).transpose(0, 1)[None] for x in (query, key))
    if rotations.takes(q, k, *(x[:1].expand(len(positions), -1)[None] for x in (cos, sin))):
        q, k = rotations.rotary_at(q, k, cos, sin, positions)
    else:
        turns = cos.index_select(0, positions)[None], sin.index_select(0, positions)[None]
        q, k = (x * turns[0][:, None] + _half_turned(x) * turns[1][:, None] for x in (q, k))
    q, k = (x[0].transpose(0, 1).reshape(x.shape[2], -1).to(query.dtype) for x in (q, k))
    return q, k


@rotary.register_fake
def _(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


@torch.library.custom_op("rl_kernels::vllm_mixture", mutates_args=())
def mixture(
    hidden: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    scoring: str,
    normalize: bool,
    rounds: bool,
    wide_logits: bool,
    wide_weights: bool,
) -> torch.Tensor:
    """Return ``[T, D]``: the experts of ``hidden[T, D]``, which a router with the definition of a ``Form`` chooses.

    ``router[E, D]``, ``gate_up[E, 2F, D]`` and ``down[E, D, F]`` have the dtype of hidden.
    """
    form = Form(scoring, normalize, rounds, (0, 1, 2), (wide_logits, wide_weights), (False, False, False, False))
    _, weights, ids = routed(form, hidden, router, top_k)
    return experts(hidden, gate_up, down, ids, weights, validate=False)


@torch.library.custom_op("rl_kernels::vllm_add_gated", mutates_args=())
def add_gated(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return ``routed[T, D] + sigmoid(gate[T, 1]) * shared[T, D]``: a shared expert beside those of a router."""
    return blocks.add_gated(routed, gate, shared)


@mixture.register_fake
@add_gated.register_fake
def _(hidden: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(hidden)


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
