"""Compare `gated_delta_rule` with flash-linear-attention: `python tools/delta_rule.py --json FILE` on a GPU.

layouts: how many numbers of outputs, states and gradients differ between a sequence alone and the same sequence packed,
padded, in pieces that a cache joins, token by token, and forked. The control: numbers that differ between FLA's chunked
and recurrent kernels on the same sequences.

errors: L2 errors of output and gradients against the recurrence in FP64, beside FLA's, relative to the norm.

decode: microseconds of a step in a CUDA graph, the mean of 64 steps of which each has one more open row, and the bytes
that a sequence keeps.

Without FLA there is no control and no peer. Exit status: 1 if a bit differs or a part failed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.gated_delta import DeltaCache, gated_delta_rule, reference
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import Clock, Effort, capture, device_seconds
from rl_kernels.lab.bench.peers import one_line

PACKAGES = ("rl-kernels-core", "rl-kernels-gated-delta", "fla-core")
PARTS = ("layouts", "errors", "decode")
KEY_HEADS, HEADS, SIZE = 16, 32, 128
"""Heads of keys and values, and their size, of Qwen3-Next and Qwen3.5-9B."""
FEW = 2, 4
"""Heads where a layout or FP64 takes its time."""
KINDS = ("packed", "padded", "pieces", "tokens", "forked")
LONGEST, SEQUENCES = 400, 6
BATCHES = 1, 16, 64, 256
NAMES = ("out", "q", "k", "v", "g", "beta")
Rows = tuple[torch.Tensor, ...]


class Alone(NamedTuple):
    """A sequence ``[1, T, ...]``, its output and last state, and gradients of its operands or None."""

    rows: Rows
    out: torch.Tensor
    state: torch.Tensor
    gradients: Rows | None


def drawn(batch: int, tokens: int, heads: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Rows:
    """Draw q, k, v, g and beta: decays as far apart as those of a trained model."""
    options: dict[str, Any] = {"device": "cuda"}
    q, k = (torch.randn(batch, tokens, heads[0], SIZE, **options).to(dtype) for _ in range(2))
    v = torch.randn(batch, tokens, heads[1], SIZE, **options).to(dtype)
    g = -torch.rand(batch, tokens, heads[1], **options) * torch.logspace(-3, 0, heads[1], **options)
    return q, k, v, g, torch.rand(batch, tokens, heads[1], **options)


def computed(rows: Rows, upstream: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """Return the output, the last states, and the gradients for ``upstream``, none if it is None."""
    leaves = [x.detach().requires_grad_(upstream is not None) for x in rows]
    out, states = gated_delta_rule(*leaves, return_state=True, **options)
    gradients = () if upstream is None else torch.autograd.grad(out, leaves, upstream)
    return out.detach(), states.detach(), gradients


def packed(sequences: Sequence[Alone], upstream: Sequence[torch.Tensor] | None, backend: str) -> Iterator[Rows]:
    """Yield pairs of a result in one row and alone."""
    bounds = torch.tensor([0, *(x.out.shape[1] for x in sequences)], device="cuda").cumsum(0)
    rows = tuple(torch.cat(parts, 1) for parts in zip(*(x.rows for x in sequences), strict=True))
    above = None if upstream is None else torch.cat(list(upstream), 1)
    out, states, gradients = computed(rows, above, cu_seqlens=bounds, backend=backend)
    for (begin, end), state, alone in zip(pairwise(bounds.tolist()), states, sequences, strict=True):
        yield out[:, begin:end], alone.out
        yield state, alone.state[0]
        yield from ((x[:, begin:end], y) for x, y in zip(gradients, alone.gradients or (), strict=True))


def padded(sequences: Sequence[Alone], upstream: Sequence[torch.Tensor] | None, backend: str) -> Iterator[Rows]:
    """Yield pairs of a result behind padding, which is NaN, and alone."""
    width = max(x.out.shape[1] for x in sequences) + 3
    starts = [width - x.out.shape[1] for x in sequences]

    def behind(parts: Sequence[torch.Tensor], value: float) -> torch.Tensor:
        filled = (
            torch.cat((x.new_full((1, n, *x.shape[2:]), value), x), 1) for x, n in zip(parts, starts, strict=True)
        )
        return torch.cat(list(filled))

    rows = tuple(behind(parts, torch.nan) for parts in zip(*(x.rows for x in sequences), strict=True))
    above = None if upstream is None else behind(upstream, 1.0)
    out, states, gradients = computed(rows, above, start=torch.tensor(starts, device="cuda"), backend=backend)
    for row, (start, alone) in enumerate(zip(starts, sequences, strict=True)):
        yield out[row, start:], alone.out[0]
        yield states[row], alone.state[0]
        yield from ((x[row, start:], y[0]) for x, y in zip(gradients, alone.gradients or (), strict=True))


def cached(sequences: Sequence[Alone], kind: str, draw: random.Random, backend: str) -> Iterator[Rows]:
    """Yield pairs of outputs that a cache joined from pieces, and alone."""
    heads = sequences[0].rows[0].shape[2], sequences[0].rows[2].shape[2]
    cache = DeltaCache.empty(len(sequences), *heads, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    done = [0] * len(sequences)

    def go_on(counts: Sequence[int]) -> Iterator[Rows]:
        parts = [[x[:, at : at + n] for x in each.rows] for each, at, n in zip(sequences, done, counts, strict=True)]
        is_step = set(counts) == {1}
        options = {} if is_step else {"cu_seqlens": torch.tensor([0, *counts], device="cuda").cumsum(0)}
        rows = (torch.cat(part, 0 if is_step else 1) for part in zip(*parts, strict=True))
        out = gated_delta_rule(*rows, cache=cache, backend=backend, **options)
        pieces = out.split(1) if is_step else out.split(list(counts), 1)
        for number, (each, piece) in enumerate(zip(sequences, pieces, strict=True)):
            yield piece, each.out[:, done[number] : done[number] + counts[number]]
            done[number] += counts[number]

    def left() -> list[int]:
        return [x.out.shape[1] - n for x, n in zip(sequences, done, strict=True)]

    if kind == "tokens":
        yield from go_on([n - min(left()) for n in left()])
        while any(left()):
            yield from go_on([1] * len(sequences))
        return
    if kind == "forked":
        # Each sequence goes on twice.
        yield from go_on([draw.randint(0, n) for n in left()])
        places = [number for number in range(len(sequences)) for _ in range(2)]
        sequences, done = [sequences[n] for n in places], [done[n] for n in places]
        cache = cache.select(places)
    while any(left()):
        most = draw.choice((1, 8, 100))
        yield from go_on([draw.randint(0, min(n, most)) for n in left()])


def layouts(number: int, backends: Sequence[str], control: Callable[[Rows], int] | None) -> dict[str, Any]:
    """Return how many numbers there were in all layouts, and how many differ, by backend and kind."""
    draw, counts = random.Random(0), {backend: Counter[str]() for backend in backends}
    of_peer = Counter[str]()
    for index in range(number):
        kind, with_gradients = KINDS[index % len(KINDS)], index % (2 * len(KINDS)) < len(KINDS)
        lengths = [draw.randint(1, LONGEST) for _ in range(draw.randint(1, SEQUENCES))]
        rows = [drawn(1, n, FEW) for n in lengths]
        upstream = [torch.randn_like(x[2]) for x in rows] if with_gradients and kind in KINDS[:2] else None
        seed = draw.random()
        for backend in backends:
            sequences = []
            for place, row in enumerate(rows):
                out, state, gradients = computed(row, upstream[place] if upstream else None, backend=backend)
                sequences.append(Alone(row, out, state, gradients or None))
            together = {"packed": packed, "padded": padded}.get(kind)
            pairs = (
                together(sequences, upstream, backend)
                if together
                else cached(sequences, kind, random.Random(seed), backend)
            )
            for value, alone in pairs:
                counts[backend][f"{kind}, numbers"] += alone.numel()
                counts[backend][f"{kind}, differ"] += int((value != alone).sum())
        if control is not None:
            for row in rows[:1]:
                of_peer["numbers"] += row[2].numel()
                of_peer["differ"] += control(row)
    return {name: dict(value) for name, value in (*counts.items(), ("fla", of_peer)) if value}


def errors(tokens: int, calls: dict[str, Callable[..., torch.Tensor]]) -> dict[str, dict[str, float]]:
    """Return relative L2 errors against the recurrence in FP64."""
    rows = drawn(1, tokens, FEW)
    upstream = torch.randn_like(rows[2])

    def results(call: Callable[..., torch.Tensor], dtype: torch.dtype | None) -> Rows:
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in rows]
        out = call(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))

    gold = results(reference.gated_delta_rule, torch.float64)
    found = {}
    for name, call in calls.items():
        pairs = zip(NAMES, results(call, None), gold, strict=True)
        found[name] = {what: float((x.double() - y).norm() / y.norm()) for what, x, y in pairs}
    return found


def decode(peer: Callable[..., Any] | None, effort: Effort) -> dict[str, dict[str, float]]:
    """Return microseconds of a step for each number of sequences, ours in turn with FLA's."""
    found = {}
    for batch in BATCHES:
        rows = drawn(batch, CHUNK, (KEY_HEADS, HEADS))
        steps = [tuple(x[:, t : t + 1].contiguous() for x in rows) for t in range(CHUNK)]
        cache = DeltaCache.empty(batch, KEY_HEADS, HEADS, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        state = torch.zeros(batch, HEADS, SIZE, SIZE, device="cuda")

        def ours(step: Rows, cache: DeltaCache = cache) -> Any:
            return gated_delta_rule(*step, cache=cache, validate=False)

        def theirs(step: Rows, state: torch.Tensor = state) -> Any:
            assert peer is not None
            return peer(*step, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

        clocks: list[Clock] = [
            capture([lambda step=step, call=call: call(step) for step in steps])
            for call in (ours, *([theirs] if peer is not None else []))
        ]
        seconds = device_seconds(clocks, effort)
        found[str(batch)] = {name: 1e6 * s for name, s in zip(("ours", "fla"), seconds, strict=False)}
        found[str(batch)]["bytes of a cache"] = sum(x.numel() * x.element_size() for x in cache) / batch
        found[str(batch)]["bytes of a state"] = state.numel() * state.element_size() / batch
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the results; return the exit status."""
    parser = Parser("delta_rule.py", __doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--layouts", type=count(1), default=1000, metavar="N", help="number of layouts (1000)")
    parser.add_argument("--tokens", type=count(1), default=16384, metavar="N", help="tokens of errors (16384)")
    parser.add_argument("--backends", nargs="+", default=["cuda-sm90", "triton"], metavar="NAME")
    parser.add_argument("--json", type=writable, metavar="FILE", help="file for the results")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this PyTorch sees no GPU")
    torch.manual_seed(0)
    settings = {"layouts": args.layouts, "tokens": args.tokens, "heads": [KEY_HEADS, HEADS, SIZE], "few": list(FEW)}
    document: dict[str, Any] = {"settings": settings, "failed": {}}
    document["environment"] = environment(torch.device("cuda"), PACKAGES)

    def fla() -> tuple[Callable[..., Any], Callable[..., Any]] | tuple[None, None]:
        try:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        except ImportError as error:
            document["failed"]["fla"] = one_line(error)
            return None, None

        def recurrent(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
            return fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **options)

        return chunk_gated_delta_rule, recurrent

    chunked, recurrent = fla()

    def control(row: Rows) -> int:
        assert chunked is not None
        assert recurrent is not None
        values = (call(*row, use_qk_l2norm_in_kernel=True)[0] for call in (chunked, recurrent))
        return int(torch.ne(*values).sum())

    calls = {name: lambda *x, name=name: gated_delta_rule(*x, backend=name) for name in args.backends}
    if chunked is not None:
        calls["fla"] = lambda *x: chunked(*x, use_qk_l2norm_in_kernel=True)[0]
    runs: dict[str, Callable[[], Any]] = {
        "layouts": lambda: layouts(args.layouts, args.backends, control if chunked is not None else None),
        "errors": lambda: errors(args.tokens, calls),
        "decode": lambda: decode(recurrent, Effort()),
    }
    for part in args.parts:
        try:
            document[part] = runs[part]()
        except Exception as error:  # Record it, and go on: a peer may fail.
            document["failed"][part] = one_line(error)
        print(part, document.get(part, document["failed"].get(part)), flush=True)
        if args.json is not None:
            write_json(args.json, document)
    differing = (n for name, kinds in document.get("layouts", {}).items() if name != "fla" for n in kinds.items())
    has_failed = not document["failed"].keys().isdisjoint(PARTS)
    return int(has_failed or any(n for name, n in differing if name.endswith("differ")))


if __name__ == "__main__":
    sys.exit(main())
