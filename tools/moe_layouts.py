"""Count how a batch changes a layer of experts: `python tools/moe_layouts.py` on a GPU; --small, elsewhere.

The layer is the end of attention and what follows: the output projection, a norm, the router, the experts. A pool of
tokens is computed one token at a time: chosen experts, weights, output, and the gradient of its row. Each layout then
puts some of them into a batch: packed or padded, among neighbors that choose their own experts or all the same, whole,
in chunks, token by token or a few at a time, as a decoder would; with gradients where the batch is whole. Counted are
tokens with any other bit than alone: for rl-kernels, and as a control for transformers' modules of Qwen3-MoE, with the
router in the dtype of the model as it is, or in FP32 as those of DeepSeek-V3 and GLM-4.5. A second control counts
tokens for which `torch.topk` chooses from the same logits other experts, or another order, than ascending ids of equal
scores.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeSparseMoeBlock

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.det_gemm import det_linear
from rl_kernels.lab.bench.environment import environment
from rl_kernels.moe import experts, route
from rl_kernels.norm import rms_norm

PACKAGES = ("rl-kernels-core", "rl-kernels-det-gemm", "rl-kernels-norm", "rl-kernels-moe", "transformers")
FULL, SMALL = (4096, 2048, 768, 128, 8, 192, 4096), (96, 64, 24, 16, 4, 12, 96)
"""Width of attention, D, F, E, k, tokens of the pool, most tokens of a batch: of Qwen3-30B-A3B, and for a CPU."""
SCORED = 16384
"""Tokens for the control of `torch.topk`."""
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


class Stock(torch.nn.Module):
    """A linear layer, a norm and a block of experts of transformers."""

    def __init__(self, attention: int, width: int, inner: int, number: int, slots: int) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=width, moe_intermediate_size=inner, num_experts=number, num_experts_per_tok=slots
        )
        config.norm_topk_prob = True
        config._experts_implementation = "grouped_mm" if torch.cuda.is_available() else "eager"
        self.project = torch.nn.Linear(attention, width, bias=False)
        self.norm = Qwen3MoeRMSNorm(width)
        self.block = Qwen3MoeSparseMoeBlock(config)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5) if weight.ndim > 1 else None
        self.requires_grad_(False)

    def forward(self, hidden: torch.Tensor, router: torch.dtype | None = None) -> Results:
        """Return ids, weights and output, with the router in a dtype of its own or that of the model."""
        x = self.norm(self.project(hidden))
        gate = self.block.gate
        if router is None:
            _, weights, ids = gate(x)
        else:
            scores = F.linear(x.to(router), gate.weight.to(router)).softmax(-1)
            weights, ids = torch.topk(scores, gate.top_k, dim=-1)
            weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return ids, weights, self.block.experts(x, ids, weights)


def ours(stock: Stock, hidden: torch.Tensor) -> Results:
    """Return those of rl-kernels with the same weights, and logits rounded as the model's."""
    x = rms_norm(det_linear(hidden, stock.project.weight), stock.norm.weight, eps=stock.norm.variance_epsilon)
    gate, layer = stock.block.gate, stock.block.experts
    routes = route(x, gate.weight, gate.top_k, logits_dtype=x.dtype)
    return routes.ids, routes.weights, experts(x, layer.gate_up_proj, layer.down_proj, routes.ids, routes.weights)


def chosen_by_topk(stock: Stock, width: int, device: torch.device) -> dict[str, int]:
    """Count tokens for which `torch.topk` chooses otherwise than by ascending id, from the same logits."""
    x = torch.randn(SCORED if device.type == "cuda" else 256, width, device=device).bfloat16()
    routes = route(x, stock.block.gate.weight, stock.block.gate.top_k, logits_dtype=x.dtype)
    counts = {"tokens": len(x)}
    for place in dict.fromkeys((device.type, "cpu")):
        ids = torch.topk(routes.logits.to(place), routes.ids.shape[1], dim=-1).indices.to(device)
        counts[f"experts, {place}"] = int((ids.sort(-1).values != routes.ids.sort(-1).values).any(1).sum())
        counts[f"order, {place}"] = int((ids != routes.ids).any(1).sum())
    return counts


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


def measured(layer: Layer, pool: torch.Tensor, upstream: torch.Tensor, number: int, most: int) -> dict[str, int]:
    """Return how many tokens of all layouts there were, and how many differ in what from themselves alone."""
    alone = computed(layer, pool, upstream, [1] * len(pool))
    counted: Counter[str] = Counter(dict.fromkeys(("tokens", "gradients"), 0))
    differing = torch.zeros(len(COUNTED), dtype=torch.int64, device=pool.device)
    for hidden, rows, tokens, calls in layouts(pool, number, most, 1):
        grad = None
        if len(calls) == 1:
            grad = upstream.new_zeros(len(hidden), upstream.shape[1])
            grad[rows] = upstream[tokens]
        results = computed(layer, hidden, grad, calls)
        counted["tokens"] += len(tokens)
        counted["gradients"] += len(tokens) if grad is not None else 0
        for place, (value, own) in enumerate(zip(results, alone, strict=False)):
            value, own = value[rows.to(value.device)], own[tokens.to(own.device)]
            if COUNTED[place] == "experts":
                # A set; another order shows in weights.
                value, own = value.sort(-1).values, own.sort(-1).values
            differing[place] += (value != own).any(1).sum()
    return {**counted, **dict(zip(COUNTED, differing.tolist(), strict=True))}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; return 1 if a token of rl-kernels differs."""
    parser = Parser("moe_layouts.py", __doc__)
    parser.add_argument("--layouts", type=count(1), default=1000, metavar="N", help="number of layouts (1000)")
    parser.add_argument("--small", action="store_true", help="a layer of few experts, and short batches")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *widths, size, most = SMALL if args.small else FULL
    torch.manual_seed(0)
    with device:
        stock = Stock(*widths).bfloat16()
    pool = torch.randn(size, widths[0], device=device).bfloat16()
    upstream = torch.randn(size, widths[1], device=device).bfloat16()
    counts: dict[str, dict[str, int]] = {}
    layers = {
        "rl-kernels": partial(ours, stock),
        "stock": stock,
        "stock, router in FP32": partial(stock, router=torch.float32),
    }
    for name, layer in layers.items():
        began = time.monotonic()
        counts[name] = measured(layer, pool, upstream, args.layouts, most)
        seconds = time.monotonic() - began
        print(
            f"{name}:",
            ", ".join(f"{value} {key}" for key, value in counts[name].items()),
            f"({seconds:.0f} s)",
            flush=True,
        )
    topk = chosen_by_topk(stock, widths[1], device)
    print("torch.topk:", ", ".join(f"{value} {key}" for key, value in topk.items()))
    if args.json:
        settings = dict(zip(("attention", "hidden", "inner", "experts", "chosen"), widths, strict=True))
        settings |= {"layouts": args.layouts, "pool": size, "longest": most, "dtype": "bf16"}
        document: dict[str, Any] = {"version": 1, "environment": environment(device, PACKAGES), "settings": settings}
        write_json(args.json, {**document, "counts": counts, "topk": topk})
    return int(any(counts["rl-kernels"][name] for name in COUNTED))


if __name__ == "__main__":
    raise SystemExit(main())
