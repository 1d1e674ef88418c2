"""The calls that `ranks.py` times: exchanges, row-parallel layers and linear_logp, ours beside NCCL's and PyTorch's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import all_reduce, group_rank, group_size, reduce_scatter
from rl_kernels.core.testing import bits_of
from rl_kernels.det_gemm import det_linear, row_parallel_linear
from rl_kernels.linear_logp import linear_logp, vocab_shards

OURS, VERL = "ours", "verl"
BF16 = torch.bfloat16
LAYERS = {
    "8B o_proj": (4096, 4096),
    "8B down_proj": (4096, 14336),
    "70B o_proj": (8192, 8192),
    "70B down_proj": (8192, 28672),
}
"""Row-parallel layers of Llama 3.1: outputs and inputs."""
ROWS = (1, 32, 1024, 8192)
VOCABULARIES = ((4096, 4096, 128256), (8192, 4096, 151936))
"""Tokens, hidden size and vocabulary."""


class Timed(NamedTuple):
    """Calls that take turns; ``differing``: number of our elements that differ from one GPU, None if not compared.

    Calls in ``eager_only`` are not captured in CUDA graphs.
    """

    name: str
    calls: Mapping[str, Callable[[], Any]]
    differing: int | None = None
    bytes: int = 0
    eager_only: tuple[str, ...] = ()


def different(result: torch.Tensor, expected: torch.Tensor) -> int:
    """Return the number of elements that differ in any bit."""
    return int((bits_of(result) != bits_of(expected)).sum())


def drawn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Return random BF16 numbers, the same on each rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(BF16)


def exchanges(group: ProcessGroup) -> Iterator[Timed]:
    """Yield reductions of FP32 parts that are rounded to BF16, from 64 KiB to 256 MiB."""
    size = group_size(group)
    for power in (16, 18, 20, 22, 24, 26, 28):
        part = torch.randn(1 << (power - 2), device="cuda").view(-1, 4096)
        half, whole, piece = part.to(BF16), part.clone(), part.to(BF16)[: len(part) // size].clone()
        calls = {
            OURS: lambda part=part: all_reduce(part, group, dtype=BF16),
            "NCCL, BF16": lambda half=half: distributed.all_reduce(half, group=group),
            "NCCL, FP32": lambda whole=whole: distributed.all_reduce(whole, group=group),
        }
        yield Timed(f"all-reduce, {1 << (power - 10)} KiB", calls, bytes=1 << power)
        calls = {
            OURS: lambda part=part: reduce_scatter(part, group, dtype=BF16),
            "NCCL, BF16": lambda piece=piece, half=half: distributed.reduce_scatter_tensor(piece, half, group=group),
        }
        if len(part) % size == 0:
            yield Timed(f"reduce-scatter, {1 << (power - 10)} KiB", calls, bytes=1 << power)


def layers(group: ProcessGroup) -> Iterator[Timed]:
    """Yield row-parallel layers beside cuBLAS and NCCL's reduction of BF16, with and without sequence parallelism."""
    size, rank = group_size(group), group_rank(group)
    for name, (outputs, inputs) in LAYERS.items():
        weight = drawn(outputs, inputs, seed=1, scale=inputs**-0.5)
        mine = weight.chunk(size, 1)[rank].contiguous()
        for rows in ROWS:
            x = drawn(rows, inputs, seed=rows)
            part = x.chunk(size, 1)[rank].contiguous()
            expected = det_linear(x, weight, k_segments=8)

            def summed(part: torch.Tensor = part, mine: torch.Tensor = mine) -> torch.Tensor:
                out = F.linear(part, mine)
                distributed.all_reduce(out, group=group)
                return out

            def scattered(part: torch.Tensor = part, mine: torch.Tensor = mine) -> torch.Tensor:
                out = F.linear(part, mine)
                piece = out.new_empty(len(out) // size, out.shape[1])
                distributed.reduce_scatter_tensor(piece, out, group=group)
                return piece

            def ours(dim: int | None, part: torch.Tensor = part, mine: torch.Tensor = mine) -> torch.Tensor:
                return row_parallel_linear(part, mine, process_group=group, scatter_dim=dim, validate=False)

            calls = {OURS: lambda ours=ours: ours(None), "cuBLAS + NCCL": summed}
            yield Timed(f"{name}, {rows} rows", calls, different(ours(None), expected))
            if rows % size == 0:
                calls = {OURS: lambda ours=ours: ours(0), "cuBLAS + NCCL": scattered}
                differing = different(ours(0), expected.chunk(size)[rank])
                yield Timed(f"{name}, {rows} rows, reduce-scatter", calls, differing)


def heads(group: ProcessGroup) -> Iterator[Timed]:
    """Yield linear_logp over the vocabulary beside one GPU, and beside logits in PyTorch, cut as Megatron cuts them."""
    size, rank = group_size(group), group_rank(group)
    for tokens, hidden_size, vocab in VOCABULARIES:
        hidden, weight = drawn(tokens, hidden_size, seed=2), drawn(vocab, hidden_size, seed=3, scale=hidden_size**-0.5)
        ids = torch.randint(vocab, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(4))
        start, stop = vocab_shards(vocab, size)[rank]
        shard = weight[start:stop].clone()
        upstream = torch.randn(tokens, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
        over = {"process_group": group, "vocab_size": vocab, "validate": False}
        alone = {"validate": False}

        def both(call: Callable[..., torch.Tensor], w: torch.Tensor, options: Any, hidden=hidden, ids=ids, up=upstream):
            h, w = hidden.detach().requires_grad_(), w.detach().requires_grad_()
            logp = call(h, w, ids, **options)
            logp.backward(up)
            return logp.detach(), h.grad, w.grad

        def forward(call: Callable[..., torch.Tensor], w: torch.Tensor, options: Any, hidden=hidden, ids=ids):
            with torch.no_grad():
                return call(hidden, w, ids, **options)

        name = f"{tokens}x{hidden_size}x{vocab}"
        eager = {"group": group, "start": start}
        # Even shards, as trainers cut: other rows than ours, the same bits.
        even, theirs = weight.chunk(size)[rank].clone(), _verl_logp(group)

        def ways(run, shard=shard, weight=weight, even=even, over=over, alone=alone, eager=eager, theirs=theirs):
            calls = {
                OURS: lambda: run(linear_logp, shard, over),
                "even shards": lambda: run(linear_logp, even, over),
                "one GPU": lambda: run(linear_logp, weight, alone),
                "logits, PyTorch": lambda: run(cut_logits_logp, shard, eager),
            }
            return calls if theirs is None else {**calls, VERL: lambda: run(theirs, even, {})}

        logps = forward(linear_logp, shard, over)
        differing = different(logps, forward(linear_logp, weight, alone))
        differing += different(logps, forward(linear_logp, even, over))
        if theirs is not None:
            torch.testing.assert_close(forward(theirs, even, {}), logps, rtol=0.0, atol=0.05)
        yield Timed(f"linear_logp {name}, forward", ways(forward), differing, eager_only=(VERL,))
        ours, single = both(linear_logp, shard, over), both(linear_logp, weight, {**alone, "vocab_segments": 8})
        evenly, single_parts = both(linear_logp, even, over), (single[2][start:stop], single[2].chunk(size)[rank])
        differing = sum(
            different(a, b)
            for result, part in zip((ours, evenly), single_parts, strict=True)
            for a, b in zip(result, (*single[:2], part), strict=True)
        )
        del ours, evenly, single, single_parts
        yield Timed(f"linear_logp {name}, forward + backward", ways(both), differing, eager_only=(VERL,))


def _verl_logp(group: ProcessGroup) -> Callable[..., torch.Tensor] | None:
    """Return log-probs by verl's kernel, or None where verl is not installed."""
    if importlib.util.find_spec("verl") is None:
        return None
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def call(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # Megatron adds the gradients of the hidden states; the kernel leaves this rank's.
        logps: torch.Tensor = kernel(_Copied.apply(hidden, group), weight, ids, 1.0, "none", group)[0]
        return logps

    return call


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def cut_logits_logp(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, group: ProcessGroup, start: int
) -> torch.Tensor:
    """Return log-probs from logits of this rank's columns: largest, sum and selected logit are reduced by NCCL."""
    logp: torch.Tensor = _CutLogits.apply(hidden, weight, ids, group, start)
    return logp


class _CutLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, ids, group, start):
        logits = F.linear(hidden, weight).float()
        top = logits.amax(-1)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=group)
        logits.sub_(top[:, None])
        mine = ids - start
        inside = (mine >= 0) & (mine < len(weight))
        mine = mine.clamp(0, len(weight) - 1)
        chosen = torch.where(inside, logits.gather(1, mine[:, None])[:, 0], 0.0)
        power = logits.exp_()
        total = power.sum(-1)
        both = torch.stack((chosen, total))
        distributed.all_reduce(both, group=group)
        ctx.save_for_backward(hidden, weight, power.div_(both[1][:, None]), mine, inside)
        ctx.group = group
        return both[0] - both[1].log()

    @staticmethod
    def backward(ctx: Any, upstream):
        hidden, weight, p, mine, inside = ctx.saved_tensors
        p = p.neg()
        p.scatter_add_(1, mine[:, None], inside[:, None].to(p.dtype))
        dz = (p * upstream[:, None]).to(hidden.dtype)
        dhidden = dz @ weight
        distributed.all_reduce(dhidden, group=ctx.group)
        return dhidden, dz.t() @ hidden, None, None, None
