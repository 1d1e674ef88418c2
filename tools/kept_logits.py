"""Time and memory of linear_logp's forward and backward pass for values of saved_mib, beside its peers, on one GPU.

All ways take turns, eagerly and each round in another order, because the power that one has used slows the next; each
number is the median of its rounds. Memory is the peak of a call beyond its inputs,
gradients included. A peer that is not installed is left out. `gemm` is the product of the logits alone.

Exit status: 1 if saved_mib changes a bit.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rl_kernels.core.command import Parser, count, writable
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import extra_memory
from rl_kernels.lab.bench.report import digits
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.spec.bench import cce, eager, gemm, liger

SHAPES = ((4096, 2048, 131072), (4096, 4096, 128256), (8192, 4096, 151936), (4096, 2048, 50257))
"""Tokens, hidden size and vocabulary."""
SAVED = (0, 256, 512, 1024, 2048, 4096)
PACKAGES = ("rl-kernels-linear-logp", "cut-cross-entropy", "liger-kernel")
PEERS = {"cce": cce("high"), "cce, all gradients": cce(None), "liger, one loss": liger}
Call = Callable[[], tuple[torch.Tensor, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times and the memory; return 1 if a bit differs."""
    parser = Parser("kept_logits.py", __doc__)
    parser.add_argument("--rounds", type=count(1), default=9, help="turns of each way (%(default)s)")
    parser.add_argument("--json", type=writable, help="file for the results")
    given = parser.parse_args(argv)
    record: dict[str, Any] = {"version": 1, "environment": environment(torch.device("cuda"), PACKAGES), "shapes": {}}
    differing = 0
    for shape in SHAPES:
        calls = ways(*shape)
        different = differing_bits(calls)
        differing += different
        found = timed(calls, given.rounds)
        name = "x".join(map(str, shape))
        record["shapes"][name] = {"ways": found, "differing": different}
        for way, (ms, mib) in found.items():
            share = ms / found["gemm"][0]
            print(f"{name}, {way}: {digits(ms)} ms ({share:.2f} of the product), {mib:,.0f} MiB", flush=True)
        print(f"{name}: {different} bits differ", flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if differing else 0


def ways(tokens: int, size: int, vocab: int) -> dict[str, Call]:
    """Return the calls of one shape: forward and backward, of `gemm` only forward."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device="cuda").bfloat16()
    weight = (torch.randn(vocab, size, device="cuda") * size**-0.5).bfloat16()
    ids = torch.randint(vocab, (tokens,), device="cuda")
    upstream = torch.randn(tokens, device="cuda")

    def both(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        logp = function(h, w, ids)
        logp.backward(upstream if logp.ndim else None)
        assert h.grad is not None
        assert w.grad is not None
        return logp.detach(), h.grad, w.grad

    found: dict[str, Call] = {"gemm": lambda: (gemm(hidden, weight, ids),)}
    found |= {"eager": partial(both, eager), "compile": partial(both, torch.compile(eager))}
    for name, make in PEERS.items():
        try:
            peer = make()
            both(peer)
        except Exception as error:
            # A peer may lack what it needs, or not take the shape.
            print(f"{name} left out: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
        else:
            found[name] = partial(both, peer)
    for mib in SAVED:
        found[name_of(mib)] = partial(both, partial(linear_logp, saved_mib=mib, validate=False))
    return found


def name_of(saved_mib: int) -> str:
    """Return the name of linear_logp with a value of saved_mib."""
    return f"linear_logp, saved_mib={saved_mib}"


def differing_bits(calls: dict[str, Call]) -> int:
    """Return how many numbers of all results differ from those without kept logits."""
    plain = [bits_of(value) for value in calls[name_of(0)]()]
    others = (calls[name_of(mib)]() for mib in SAVED[1:])
    pairs = (zip(plain, other, strict=True) for other in others)
    return sum(int((a != bits_of(b)).sum()) for pair in pairs for a, b in pair)


def timed(calls: dict[str, Call], rounds: int) -> dict[str, tuple[float, float]]:
    """Return milliseconds and peak MiB of each call."""
    memory = {}
    for name, call in calls.items():
        call()
        torch.cuda.empty_cache()
        memory[name] = extra_memory(call, torch.device("cuda")) or 0.0
    spent: dict[str, list[float]] = {name: [] for name in calls}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    order, chance = list(calls), random.Random(0)
    for turn in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            if turn:
                spent[name].append(begin.elapsed_time(end))
    return {name: (statistics.median(values), memory[name]) for name, values in spent.items()}


if __name__ == "__main__":
    sys.exit(main())
