"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.moe.activations import NAMES
from rl_kernels.moe.backends.triton import backend
from rl_kernels.moe.choice import SCORINGS
from rl_kernels.moe.op import order_size

COUNT, WIDTH, INNER, SLOTS = 128, 2048, 768, 8
"""Experts, D, F and slots of Qwen3-30B-A3B."""
TOKENS = (1, 256, 8192)
"""Numbers of tokens for which a product takes low, medium and high tiles."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype."""
    weights = empty(COUNT, 2 * INNER, WIDTH, dtype=dtype), empty(COUNT, WIDTH, INNER, dtype=dtype)
    turned = empty(COUNT, WIDTH, 2 * INNER, dtype=dtype).mT, empty(COUNT, INNER, WIDTH, dtype=dtype).mT
    # A last dim that no descriptor can describe.
    odd = tuple(empty(*x.shape[:-1], x.shape[-1] + 1, dtype=dtype)[..., :-1] for x in weights)
    biases = empty(COUNT, 2 * INNER, dtype=dtype), empty(COUNT, WIDTH, dtype=dtype)
    for tokens, activation, (gate_up, down) in zip(TOKENS, NAMES, (odd, turned, weights), strict=True):
        hidden, ids = empty(tokens, WIDTH, dtype=dtype), empty(tokens, SLOTS, dtype=torch.int32)
        routes = hidden, gate_up, down, ids, empty(tokens, SLOTS)
        yield partial(backend.forward_kept, *routes, *biases, hidden, activation, False)
        yield partial(backend.combine, hidden, ids, ids, routes[-1], hidden, COUNT)
        yield partial(backend.forward, *routes, None, None, None, activation, True)
        yield partial(backend.backward, *routes, *biases, None, activation, True, hidden, None, None, [True] * 6)
        buffers = (torch.empty_like(x, dtype=torch.float32) for x in (gate_up, down))
        saved = empty(tokens * SLOTS, 2 * INNER, dtype=dtype), empty(order_size(ids, COUNT), dtype=torch.int32)
        without, needs = (None, None, None, activation, False), [True, True, *[False] * 4]
        yield partial(backend.backward_into, *routes, *without, hidden, *saved, *buffers, needs)
    for scoring, groups, kept in zip(SCORINGS, (1, 8, 1), (1, 4, 1), strict=True):
        router, logits = empty(COUNT, WIDTH, dtype=dtype), empty(TOKENS[1], COUNT)
        hidden = empty(TOKENS[1], WIDTH, dtype=dtype)
        ids, grad = empty(TOKENS[1], SLOTS, dtype=torch.int32), empty(TOKENS[1], SLOTS)
        yield partial(backend.route_choose, logits, None, None, SLOTS, groups, kept, scoring, True, 1.0)
        form = (scoring, True, 1.0, [True, True, False])
        yield partial(backend.route_backward, grad, None, hidden, router, logits, ids, *form)
