"""Count how a batch changes a layer of experts: `python tools/moe_layouts.py` on a GPU; --small, elsewhere.

A pool of tokens is computed one token at a time: ids, weights, output, and the gradient of its row. Each layout then
puts some of them into a batch: packed or padded, among neighbors that choose their own experts or all the same, whole,
in chunks, token by token or a few at a time, as a decoder would; with gradients where the batch is whole. Counted are
tokens with any other bit than alone: for rl-kernels, and as a control for stock operators, which are a linear router,
softmax, `torch.topk`, and the experts of transformers (on a CPU those of its eager modules). Stock routers multiply in
the dtype of the model, as Qwen3-MoE's does, or in FP32, as those of DeepSeek-V3 and GLM-4.5 do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.lab.bench.environment import environment
from rl_kernels.moe import experts, route
from rl_kernels.moe.spec.bench import eager, grouped

PACKAGES = ("rl-kernels-core", "rl-kernels-moe")
FULL, SMALL = (4096, 1408, 128, 8, 192, 4096), (64, 24, 16, 4, 12, 96)
"""D, F, E, k, tokens of the pool, most tokens of a batch: of GLM-4.5-Air, and for a CPU.

On an H200 cuBLAS multiplies BF16 rows of 2048 by 128 alike in all batches, those of 4096 with another kernel from 1,000
rows on, so with the widths of Qwen3-30B-A3B the stock layer is no control.
"""
CUTS = ("whole", "chunks", "few", "one")
COUNTED = ("experts", "weights", "output", "gradient")
Results = tuple[torch.Tensor, ...]
Layer = Callable[[torch.Tensor], Results]


class Layout(NamedTuple):
    """A batch: which of its rows are tokens of the pool, and sizes of the calls that compute it."""

    hidden: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor
    calls: list[int]


class Weights(NamedTuple):
    """The weights of a layer, and k."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    slots: int


def ours(w: Weights, hidden: torch.Tensor) -> Results:
    """Return ids, weights and output of rl-kernels, whose logits are rounded as the stock ones."""
    routes = route(hidden, w.router, w.slots, logits_dtype=hidden.dtype)
    return routes.ids, routes.weights, experts(hidden, w.gate_up, w.down, routes.ids, routes.weights)


def stock(w: Weights, hidden: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Results:
    """Return those of the operators that transformers calls, with a router that multiplies in ``dtype``."""
    scores = F.linear(hidden.to(dtype), w.router.to(dtype)).float().softmax(-1)
    weights, ids = torch.topk(scores, w.slots, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
    layer = grouped() if hidden.is_cuda else eager
    return ids, weights, layer(hidden, w.gate_up, w.down, ids, weights)


def layouts(pool: torch.Tensor, number: int, most: int, seed: int) -> Iterator[Layout]:
    """Yield batches with some tokens of the pool among others, or zeros, in a random order."""
    draw = random.Random(seed)
    generator = torch.Generator(pool.device).manual_seed(seed)
    for index in range(number):
        cut = CUTS[index % len(CUTS)]
        size = draw.randint(1, 16) if cut == "one" else int((most // 8 if cut == "few" else most) ** draw.random())
        tokens = torch.tensor(draw.sample(range(len(pool)), min(len(pool), draw.randint(1, size))))
        hidden = torch.randn(size, pool.shape[1], device=pool.device, generator=generator).to(pool.dtype)
        if draw.random() < 0.3:
            # Equal neighbors: all of them choose the same experts.
            hidden = hidden[:1].repeat(size, 1)
        if draw.random() < 0.3:
            hidden[draw.randrange(size) :] = 0
        rows = torch.tensor(draw.sample(range(size), len(tokens))).sort().values
        hidden[rows] = pool[tokens]
        calls = {"whole": [size], "one": [1] * size}.get(cut) or list(_parts(draw, size, 8 if cut == "few" else size))
        yield Layout(hidden, rows, tokens, calls)


def _parts(draw: random.Random, size: int, most: int) -> Iterator[int]:
    while size:
        part = draw.randint(min(size, max(1, most // 8)), min(size, most))
        yield part
        size -= part


def computed(layer: Layer, hidden: torch.Tensor, upstream: torch.Tensor | None, calls: Sequence[int]) -> Results:
    """Return ids, weights, output and, with upstream, the gradient of hidden, computed in these calls."""
    parts = []
    for place, rows in enumerate(hidden.split(list(calls))):
        with torch.set_grad_enabled(upstream is not None):
            leaf = rows.detach().requires_grad_(upstream is not None)
            results = layer(leaf)
            if upstream is not None:
                grad = torch.autograd.grad(results[-1], leaf, upstream.split(list(calls))[place])
                results = (*results, *grad)
        parts.append([x.detach() for x in results])
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def measured(layer: Layer, pool: torch.Tensor, upstream: torch.Tensor, number: int, most: int) -> Counter[str]:
    """Return how many tokens of all layouts there were, and how many differ in what from themselves alone."""
    alone = computed(layer, pool, upstream, [1] * len(pool))
    counted: Counter[str] = Counter(dict.fromkeys(("tokens", "gradients", *COUNTED), 0))
    for seed_layout in layouts(pool, number, most, 1):
        hidden, rows, tokens, calls = seed_layout
        grad = None
        if len(calls) == 1:
            grad = torch.zeros_like(hidden)
            grad[rows] = upstream[tokens]
        results = computed(layer, hidden, grad, calls)
        counted["tokens"] += len(tokens)
        counted["gradients"] += len(tokens) if grad is not None else 0
        for name, value, own in zip(COUNTED, results, alone, strict=False):
            counted[name] += int((value[rows.to(value.device)] != own[tokens.to(own.device)]).any(1).sum())
    return counted


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; return 1 if a token of rl-kernels differs."""
    parser = Parser("moe_layouts.py", __doc__)
    parser.add_argument("--layouts", type=count(1), default=1000, metavar="N", help="number of layouts (1000)")
    parser.add_argument("--small", action="store_true", help="a layer of few experts, and short batches")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width, inner, number, slots, size, most = SMALL if args.small else FULL
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)).bfloat16()

    weights = Weights(draw(number, width), draw(number, 2 * inner, width), draw(number, width, inner), slots)
    pool, upstream = (torch.randn(size, width, device=device).bfloat16() for _ in range(2))
    counts: dict[str, Any] = {}
    keys = ("tokens", "gradients", *COUNTED)
    print(f"{args.layouts} layouts; tokens that differ from themselves alone:")
    stock_in_fp32 = partial(stock, dtype=torch.float32)
    for name, layer in (("rl-kernels", ours), ("stock", stock), ("stock, router in FP32", stock_in_fp32)):
        counted = measured(lambda x, layer=layer: layer(weights, x), pool, upstream, args.layouts, most)
        counts[name] = counted
        print(f"{name}:", ", ".join(f"{counted[key]} {key}" for key in keys), flush=True)
    if args.json:
        write_json(args.json, {"version": 1, "environment": environment(device, PACKAGES), "counts": counts})
    return int(any(counts["rl-kernels"][name] for name in COUNTED))


if __name__ == "__main__":
    raise SystemExit(main())
