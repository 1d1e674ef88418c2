"""Time and memory from hidden states to gradients: every form of linear_logp beside its peers, on one GPU.

Each number counts a forward and a backward pass in BF16. `in turn`: the ways take turns, each round in another order,
because the power that one has used slows the next; the median of the rounds, host time included. `sustained`: a way
alone for a second, back to back, so that the host runs ahead. Memory is the peak of a call beyond its inputs, with
gradients, but without a `main_grad`, which exists before. A peer that is not installed is left out. `gemm` is the
product of the logits alone.

Exit status: 1 if a form of linear_logp changes a bit.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.testing import bits_of
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import extra_memory
from rl_kernels.lab.bench.report import digits
from rl_kernels.linear_logp import (
    Chunk,
    Memory,
    linear_logp,
    linear_logp_from_known,
    linear_logp_known,
    linear_logp_loss,
)
from rl_kernels.linear_logp.spec.bench import cce, eager, gemm, liger

SHAPES = ((4096, 2048, 131072), (4096, 4096, 128256), (8192, 4096, 151936), (4096, 2048, 50257))
"""Tokens, hidden size and vocabulary."""
SAVED = (0, 256, 512, 1024, 2048, 1 << 20)
CHUNKS = (2048, 4096)
LENGTH = 512
"""Tokens of a sequence of `linear_logp_loss`."""
PACKAGES = ("rl-kernels-linear-logp", "cut-cross-entropy", "liger-kernel")
PEERS = {"cce": cce("high"), "cce, all gradients": cce(None), "liger, one loss": liger}
PLAIN = "linear_logp"
SECONDS = 1.0
Call = Callable[[], tuple[torch.Tensor, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print times and memory; return 1 if a bit differs."""
    parser = Parser("head_times.py", __doc__)
    parser.add_argument("--rounds", type=count(1), default=9, help="turns of each way (%(default)s)")
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {"version": 1, "environment": environment(torch.device("cuda"), PACKAGES), "shapes": {}}
    differing = 0
    for shape in SHAPES:
        calls = ways(*shape)
        different = differing_bits(calls)
        differing += different
        times_by_way = timed(calls, args.rounds)
        name = "x".join(map(str, shape))
        record["shapes"][name] = {"ways": times_by_way, "differing": different}
        for way, (turn, lasting, mib) in times_by_way.items():
            of_turn, of_lasting = turn / times_by_way["gemm"][0], lasting / times_by_way["gemm"][1]
            times = f"in turn {digits(turn)} ms ({of_turn:.2f}), sustained {digits(lasting)} ms ({of_lasting:.2f})"
            print(f"{name}, {way}: {times}, {mib:,.0f} MiB", flush=True)
        print(f"{name}: {different} bits differ", flush=True)
        if args.json:
            write_json(args.json, record)
    return 1 if differing else 0


class Operands:
    """The operands of one shape, and a batch of sequences."""

    def __init__(self, tokens: int, size: int, vocab: int) -> None:
        """Draw them on the GPU."""
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, size, device="cuda").bfloat16()
        self.weight = (torch.randn(vocab, size, device="cuda") * size**-0.5).bfloat16()
        self.ids = torch.randint(vocab, (tokens,), device="cuda")
        self.upstream = torch.randn(tokens, device="cuda")
        self.main_grad = torch.zeros(vocab, size, device="cuda")
        self.offsets = list(range(0, tokens + 1, LENGTH))
        with torch.no_grad():
            self.known = linear_logp_known(self.hidden, self.weight, self.ids)

    def losses(self, logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the losses of a chunk's sequences, whose gradient is `upstream`."""
        return (logp * self.upstream[chunk.tokens]).view(-1, LENGTH).sum(1)

    def both(self, function: Callable[..., torch.Tensor], continues: bool = False) -> tuple[torch.Tensor, ...]:
        """Return the gradients of hidden and weight."""
        hidden, weight = self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()
        if continues:
            weight.main_grad = self.main_grad
        result = function(hidden, weight, self.ids)
        result.backward(self.upstream if result.ndim else None)
        assert hidden.grad is not None
        dweight = self.main_grad if continues else weight.grad
        assert dweight is not None
        return hidden.grad, dweight

    def ours(self) -> dict[str, Call]:
        """Return the forms of linear_logp."""
        plain = partial(linear_logp, validate=False)
        forms: dict[str, Callable[..., torch.Tensor]] = {PLAIN: plain}
        forms[f"{PLAIN}, memory=fast"] = partial(plain, memory="fast")
        for mib in SAVED[1:]:
            forms[f"{PLAIN}, saved_mib={'all' if mib == SAVED[-1] else mib}"] = partial(
                plain, memory=Memory(saved_mib=mib)
            )
        forms[f"{PLAIN}, known"] = partial(linear_logp_from_known, known=self.known, validate=False)
        for chunk in CHUNKS:
            options = {"cu_seqlens": self.offsets, "chunk_tokens": chunk, "validate": False}
            forms[f"linear_logp_loss, chunk_tokens={chunk}"] = partial(self._loss, options)
        calls: dict[str, Call] = {name: partial(self.both, form) for name, form in forms.items()}
        continued = {
            name: partial(self.both, form, True)
            for name, form in forms.items()
            if "saved" not in name and "fast" not in name
        }
        return calls | {f"{name}, main_grad": call for name, call in continued.items()}

    def _loss(self, options: dict[str, Any], hidden: Any, weight: Any, ids: Any) -> torch.Tensor:
        return linear_logp_loss(hidden, weight, ids, self.losses, **options)


def ways(tokens: int, size: int, vocab: int) -> dict[str, Call]:
    """Return the calls of one shape: forward and backward, of `gemm` only forward."""
    operands = Operands(tokens, size, vocab)
    product = operands.hidden, operands.weight, operands.ids
    calls: dict[str, Call] = {"gemm": lambda: (gemm(*product),)}
    calls |= {"eager": partial(operands.both, eager), "compile": partial(operands.both, torch.compile(eager))}
    for name, make in PEERS.items():
        try:
            peer = make()
            operands.both(peer)
        except Exception as error:
            # A peer may lack what it needs, or not take the shape.
            print(f"{name} left out: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
        else:
            calls[name] = partial(operands.both, peer)
    return calls | operands.ours()


def differing_bits(calls: dict[str, Call]) -> int:
    """Return the number of gradient elements that differ from the plain call's."""
    expected, total = [value.clone() for value in calls[PLAIN]()], 0
    for name, call in calls.items():
        if not name.startswith(PLAIN):
            continue
        if name.endswith("main_grad"):
            # The call adds to it.
            call()[1].zero_()
        results = [value.to(target.dtype) for value, target in zip(call(), expected, strict=True)]
        total += sum(int((bits_of(a) != bits_of(b)).sum()) for a, b in zip(results, expected, strict=True))
    return total


def timed(calls: dict[str, Call], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return milliseconds in turn and sustained, and peak MiB, of each call."""
    memory = {}
    for name, call in calls.items():
        call()
        torch.cuda.empty_cache()
        memory[name] = extra_memory(call, torch.device("cuda")) or 0.0
    spent: dict[str, list[float]] = {name: [] for name in calls}
    order, chance = list(calls), random.Random(0)
    for turn in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            ms = of_calls(calls[name], 1)
            if turn:
                spent[name].append(ms)
    turns = {name: statistics.median(values) for name, values in spent.items()}
    return {name: (turns[name], sustained(call, turns[name]), memory[name]) for name, call in calls.items()}


def of_calls(call: Call, times: int) -> float:
    """Return the milliseconds of some calls, one after the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def sustained(call: Call, ms: float) -> float:
    """Return the milliseconds of a call that runs alone for a second, once it has run for half of one."""
    started = time.monotonic()
    while time.monotonic() - started < SECONDS / 2:
        of_calls(call, 1)
    times = max(int(SECONDS * 1e3 / ms), 2)
    return of_calls(call, times) / times


if __name__ == "__main__":
    sys.exit(main())
