"""Experts over ranks for `ranks.py`: ours beside one GPU with all experts, and beside a plain dispatch in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rank_calls import BF16, OURS, Timed, different, drawn
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from rl_kernels.core.distributed import group_rank, group_size
from rl_kernels.moe import experts

COUNT, WIDTH, INNER, SLOTS = 128, 2048, 768, 8
"""Experts, D, F and slots of Qwen3-30B-A3B."""
TRAINED, DECODED = (8192, 32768), 64
"""Tokens of all ranks; of each rank in a decode step."""
ALONE, DISPATCH = "one GPU", "all-to-all, PyTorch"


class Layer(NamedTuple):
    """The tokens of all ranks and all experts; ``part`` and ``own`` are those of this rank."""

    hidden: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    upstream: torch.Tensor
    part: slice
    own: slice


def mixtures(group: ProcessGroup) -> Iterator[Timed]:
    """Yield layers of Qwen3-30B-A3B's widths: training, with even and skewed loads, and a decode step in a graph."""
    for tokens in TRAINED:
        for skewed in (False, True):
            layer = layer_of(tokens, skewed, group)
            name = f"{tokens} tokens" + (", skewed" if skewed else "")
            yield from _trained(name, layer, group)
    layer = layer_of(DECODED * group_size(group), False, group)
    bound = {"max_tokens": DECODED}
    with torch.no_grad():
        differing = different(ours(layer, group, **bound), alone(layer)[layer.own])

        def calls() -> dict[str, Callable[[], Any]]:
            return {
                OURS: torch.no_grad()(lambda: ours(layer, group, **bound)),
                ALONE: torch.no_grad()(lambda: alone(layer)),
                DISPATCH: torch.no_grad()(lambda: dispatched(layer, group)),
            }

        yield Timed(f"{DECODED} tokens of each rank, bound", calls(), differing, eager_only=(DISPATCH,))


def layer_of(tokens: int, skewed: bool, group: ProcessGroup) -> Layer:
    """Return a layer; skewed: half of the tokens have the same eight experts."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    scores = torch.randn(tokens, COUNT, generator=generator, device="cuda")
    if skewed:
        scores[::2, :SLOTS] += 100
    weights, ids = scores.softmax(-1).topk(SLOTS)
    each, count, rank = tokens // group_size(group), COUNT // group_size(group), group_rank(group)
    return Layer(
        drawn(tokens, WIDTH, seed=1),
        drawn(COUNT, 2 * INNER, WIDTH, seed=2, scale=WIDTH**-0.5),
        drawn(COUNT, WIDTH, INNER, seed=3, scale=INNER**-0.5),
        ids,
        weights / weights.sum(-1, keepdim=True),
        drawn(tokens, WIDTH, seed=4),
        slice(count * rank, count * rank + count),
        slice(each * rank, each * rank + each),
    )


def _trained(name: str, layer: Layer, group: ProcessGroup) -> Iterator[Timed]:
    leaves = {
        OURS: layer._replace(**_cut(layer)),
        ALONE: layer,
        DISPATCH: layer._replace(**_cut(layer)),
    }
    calls = {OURS: lambda x: ours(x, group), ALONE: alone, DISPATCH: lambda x: dispatched(x, group)}

    def forward(who: str) -> torch.Tensor:
        with torch.no_grad():
            return calls[who](leaves[who])

    def both(who: str) -> list[torch.Tensor]:
        values = {key: getattr(leaves[who], key).detach().requires_grad_() for key in GRADED}
        out = calls[who](leaves[who]._replace(**values))
        upstream = layer.upstream if who == ALONE else layer.upstream[layer.own]
        return [out.detach(), *torch.autograd.grad(out, list(values.values()), upstream)]

    torch.testing.assert_close(forward(DISPATCH), forward(OURS), rtol=0.05, atol=0.05)
    result, expected = both(OURS), both(ALONE)
    cuts = (layer.own, layer.own, layer.own, layer.part, layer.part)
    differing = [different(a, b[cut]) for a, b, cut in zip(result, expected, cuts, strict=True)]
    del result, expected
    for title, run, wrong in (("forward", forward, differing[:1]), ("forward + backward", both, differing)):
        timed = {who: lambda run=run, who=who: run(who) for who in calls}
        yield Timed(f"{name}, {title}", timed, sum(wrong), eager_only=tuple(timed))


GRADED = ("hidden", "weights", "gate_up", "down")


def _cut(layer: Layer) -> dict[str, torch.Tensor]:
    rows = {key: getattr(layer, key)[layer.own] for key in ("hidden", "ids", "weights")}
    return {**rows, "gate_up": layer.gate_up[layer.part], "down": layer.down[layer.part]}


def alone(layer: Layer) -> torch.Tensor:
    """Return the output of all tokens from all experts."""
    return experts(*layer[:5], validate=False)


def ours(layer: Layer, group: ProcessGroup, **options: Any) -> torch.Tensor:
    """Return the output of this rank's tokens; what is not cut yet is cut."""
    if len(layer.gate_up) == COUNT:
        layer = layer._replace(**_cut(layer))
    return experts(*layer[:5], process_group=group, num_experts=COUNT, validate=False, **options)


def dispatched(layer: Layer, group: ProcessGroup) -> torch.Tensor:
    """Return the same as plain PyTorch computes it: each route travels, and ``torch._grouped_mm`` takes sorted rows."""
    if len(layer.gate_up) == COUNT:
        layer = layer._replace(**_cut(layer))
    hidden, gate_up, down, ids, weights, *_ = layer
    ranks, slots, flat = group_size(group), ids.shape[1], ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(COUNT, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    counts = counts.view(ranks, -1)
    received = torch.empty_like(counts)
    distributed.all_to_all_single(received, counts, group=group)
    sent_sizes, sizes = torch.stack((counts.sum(1), received.sum(1))).tolist()
    rows = wait_tensor(all_to_all_single_autograd(hidden[order // slots], sizes, sent_sizes, group))
    local = torch.arange(len(gate_up), device=ids.device).repeat(ranks)
    turn = local.repeat_interleave(received.flatten(), output_size=sum(sizes)).argsort(stable=True)
    ends = received.sum(0).cumsum(0).int()
    gate, up = torch._grouped_mm(rows[turn], gate_up.mT, offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)[turn.argsort()]
    y = wait_tensor(all_to_all_single_autograd(y, sent_sizes, sizes, group))[order.argsort()]
    return (y.view(*ids.shape, -1) * weights.to(BF16)[..., None]).sum(1)
