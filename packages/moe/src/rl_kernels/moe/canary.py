"""The calls of the canary (``core.canary``): experts with several tiles of routes and one without any, and routes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import numbers
from rl_kernels.moe.api import experts, route

TOKENS, WIDTH, INNER, COUNT, SLOTS = 300, 136, 72, 6, 2


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the output of experts, and the weights of routes."""
    hidden, gate_up, down, ids, weights = operands(dtype, device)
    yield experts(hidden, gate_up, down, ids, weights, backend=backend)
    hidden, router = (
        numbers(rows, WIDTH, salt=salt, dtype=dtype, device=device) for rows, salt in ((TOKENS, 5), (COUNT, 6))
    )
    yield route(hidden, router, SLOTS, backend=backend).weights


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of hidden, both weights, and the weights of routes."""
    hidden, gate_up, down, ids, weights = operands(dtype, device)
    leaves = [x.requires_grad_() for x in (hidden, gate_up, down, weights)]
    upstream = numbers(TOKENS, WIDTH, salt=7, dtype=dtype, device=device)
    out = experts(hidden, gate_up, down, ids, weights, backend=backend)
    yield from torch.autograd.grad(out, leaves, upstream)


def operands(
    dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of ``experts``: the first expert has most routes, the last one none."""
    hidden = numbers(TOKENS, WIDTH, salt=1, dtype=dtype, device=device)
    gate_up = numbers(COUNT * 2 * INNER, WIDTH, salt=2, dtype=dtype, device=device, scale=2**-7)
    down = numbers(COUNT * WIDTH, INNER, salt=3, dtype=dtype, device=device, scale=2**-6)
    token = torch.arange(TOKENS, device=device)
    ids = torch.stack((torch.where(token % 5 > 0, 0, 1 + token % 3), 1 + token % (COUNT - 2)), 1)
    weights = numbers(TOKENS, SLOTS, salt=4, dtype=torch.float32, device=device)
    return hidden, gate_up.view(COUNT, 2 * INNER, WIDTH), down.view(COUNT, WIDTH, INNER), ids, weights
