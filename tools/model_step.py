"""A whole Llama, stock and under `invariant()`: time and bits; `python tools/model_step.py` on a GPU.

The model has random weights and, by default, the widths of Llama 3.1 8B with four of its layers; only its body runs,
without the head. It runs unchanged (SDPA), under torch.compile, with Liger's kernels if they are installed, under
`invariant()`, and under both. Times are wall times of several calls, host included, with a wait for the device after
the last one; the ways take turns, and the ratios are of medians. Decoding is one token per sequence with a static
cache, in a CUDA graph; `generate` is eager, with one prompt; `generate_batch` is transformers' continuous batching with
its default settings.

Bits: how many elements of the logits, and of the log-probabilities of `head_logp`, differ between prompts alone and the
same prompts in batches, padded, packed, in chunks and so on; and the gradients of a packed and of a padded batch.

Exit status: 1 if a bit differs under `invariant()`; 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from model_continuous import ANSWER, batched
from model_ways import (
    LONGEST,
    OURS,
    STOCK,
    Way,
    decoding,
    differing,
    generated,
    gradients,
    layer_profile,
    prompts,
    ways,
)
from rich.console import Console
from rich.table import Table

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.contract import DTYPES
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import GRAPH, clock_of
from rl_kernels.lab.bench.peers import one_line
from rl_kernels.lab.bench.report import digits

PACKAGES = ("transformers", "rl-kernels-models", "rl-kernels-det-gemm", "rl-kernels-attention", "rl-kernels-norm")
SECONDS = 0.15
"""Length of one turn of calls."""
BOTH = (1 << 11, 1 << 13)
"""Batches with this many tokens run backward too."""


def in_turn(calls: Mapping[str, tuple[Way, Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Return the milliseconds of each call: the median over rounds in which the calls take turns."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, (way, call) in calls.items():
        with way.taken():
            _timed(call, 2)
            counts[name] = max(1, min(200, round(SECONDS / _timed(call, 1))))
    for _ in range(rounds):
        for name, (way, call) in calls.items():
            with way.taken():
                spent[name].append(_timed(call, counts[name]) / counts[name] * 1e3)
    return {name: statistics.median(values) for name, values in spent.items()}


def _timed(call: Callable[[], Any], times: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(times):
        call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sizes(text: str) -> list[tuple[int, int]]:
    """Return batches: an argument type."""
    try:
        found = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    except ValueError:
        found = [()]
    if any(len(pair) != 2 or min(pair) < 1 for pair in found):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2x1024,4x2048, got {text!r}")
    return [(pair[0], pair[1]) for pair in found]


class Report:
    """The results, written to a file after each part, because later parts may fail."""

    def __init__(self, given: argparse.Namespace) -> None:
        settings = {name: value for name, value in vars(given).items() if name != "json"}
        where = environment(torch.device(given.device), [*PACKAGES, *_installed("liger_kernel")])
        self.found: dict[str, Any] = {"version": 1, "environment": where, "settings": settings, "ms": {}, "failed": {}}
        self._file: Path | None = given.json

    def keep(self, part: str, name: str, value: Any) -> None:
        """Add the result of one part."""
        self.found.setdefault(part, {})[name] = value
        if self._file is not None:
            write_json(self._file, self.found)

    def times(self, name: str, calls: Mapping[str, tuple[Way, Callable[[], Any]]], rounds: int) -> None:
        """Time calls in turn, and keep the times; calls that fail are recorded and left out."""
        working = {}
        for who, (way, call) in calls.items():
            try:
                with way.taken():
                    _timed(call, 1)
                working[who] = way, call
            except Exception as error:  # Record it, and time the others.
                self.keep("failed", f"{name}, {who}", one_line(error))
        found = in_turn(working, rounds)
        self.keep("ms", name, found)
        stock = found.get(STOCK)
        line = ", ".join(f"{who} {digits(ms)}" + (f" ({ms / stock:.2f})" if stock else "") for who, ms in found.items())
        print(f"{name}: {line}", flush=True)


def _installed(module: str) -> list[str]:
    return [module] if find_spec(module) else []


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a step captured in a CUDA graph; ``RuntimeError`` if it cannot be captured."""
    clock = clock_of([step])
    if clock.how != GRAPH:
        raise RuntimeError("the step cannot be captured in a CUDA graph")

    # The default argument keeps alive what the step reads, such as its cache: the graph does not.
    def replay(_: Callable[[], Any] = step) -> None:
        clock.play()

    return replay


def measure(report: Report, found: Sequence[Way], given: argparse.Namespace) -> None:
    """Time every pass."""
    device, dtype = torch.device(given.device), DTYPES[given.dtype]
    for batch, tokens in given.sizes:
        ids = torch.randint(1, given.vocab, (batch, tokens), device=device)
        label = f"{batch}x{tokens}"
        forward = {way.name: (way, lambda way=way, ids=ids: way.forward(ids)) for way in found}
        report.times(f"forward {label}", forward, given.rounds)
        if batch * tokens in BOTH or given.device == "cpu":
            above = torch.randn(batch, tokens, given.hidden, device=device, dtype=dtype)
            both = {way.name: (way, lambda way=way, ids=ids, up=above: way.both(ids, up)) for way in found}
            report.times(f"forward + backward {label}", both, given.rounds)
        for way in found:
            way.model.zero_grad(set_to_none=True)
    plain = [way for way in found if way.body is way.model.model]
    if given.device == "cuda":
        ids = torch.randint(1, given.vocab, given.sizes[-1], device=device)
        for way in plain:
            with way.taken():
                report.keep("profile", way.name, layer_profile(way, ids))
    steps = {}
    for way in plain:
        try:
            with way.taken():
                step = decoding(way, given.decoded, given.keys)
                steps[way.name] = way, captured(step) if given.device == "cuda" else step
        except Exception as error:  # As above.
            report.keep("failed", f"decode, {way.name}", one_line(error))
    how = ", CUDA graph" if given.device == "cuda" else ""
    report.times(f"decode, {given.decoded} sequences, {given.keys} keys{how}", steps, given.rounds)
    steps.clear()
    eager = {way.name: (way, generated(way, given.generated)) for way in plain}
    report.times(f"generate, 1 prompt, {given.generated} tokens, eager", eager, max(given.rounds // 2, 1))
    each = prompts(given)
    together = {way.name: (way, batched(way.model, each, ANSWER)) for way in found if way.name in (STOCK, OURS)}
    report.times(f"generate_batch, {given.prompts} prompts, {ANSWER} tokens", together, 1)


def bits(report: Report, found: Sequence[Way], given: argparse.Namespace) -> int:
    """Count differing elements of the ways that are not compiled; return the count of ours."""
    each, ours = prompts(given), 0
    for way in found:
        if way.name not in (STOCK, OURS):
            continue
        with way.taken():
            differ = differing(way, each)
            of_gradients = gradients(way, given)
        report.keep("bits", way.name, {"prompts": differ, "gradients": of_gradients})
        if way.name == OURS:
            ours = of_gradients["differ"] + sum(counts["logits"] + counts["logps"] for counts in differ.values())
    return ours


def show(document: dict[str, Any]) -> None:
    """Print the bits, then the times and their ratios to the stock model's."""
    for way, counted in document.get("bits", {}).items():
        for name, counts in counted["prompts"].items():
            print(
                f"{way}, {name}: {counts['logits']:,} of {counts['of_logits']:,} logits and {counts['logps']:,} of "
                f"{counts['of_logps']:,} log-probabilities differ"
            )
        found = counted["gradients"]
        print(f"{way}, gradients packed and padded: {found['differ']:,} of {found['elements']:,} differ")
    for way, parts in document.get("profile", {}).items():
        print(f"{way}, ms of a layer: " + ", ".join(f"{name} {digits(ms)}" for name, ms in parts.items()))
    for name, reason in document["failed"].items():
        print(f"failed: {name}: {reason}")
    print("ran on " + ", ".join(f"{name} {value}" for name, value in document["environment"].items()))
    rows = document["ms"]
    names = list(dict.fromkeys(name for found in rows.values() for name in found))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(("ms", *names)):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row, found in rows.items():
        table.add_row(row, *(_cell(found, name) for name in names))
    Console(width=160).print(table)


def _cell(found: Mapping[str, float], name: str) -> str:
    if name not in found:
        return ""
    ratio = f" ({found[name] / found[STOCK]:.2f})" if name != STOCK and STOCK in found else ""
    return digits(found[name]) + ratio


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser("model_step.py", "Time a Llama with random weights, stock and under invariant(), and compare bits.")
    numbers = {"layers": 4, "hidden": 4096, "between": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}
    numbers |= {"prompts": 32, "longest": LONGEST, "decoded": 64, "keys": 2048, "generated": 64, "rounds": 7}
    for name, default in numbers.items():
        flag = "--" + name.replace("_", "-")
        made.add_argument(flag, type=count(1), default=default, metavar="N", help=f"default: {default}")
    default_sizes = "2x1024,4x2048,1x8192,1x16384"
    made.add_argument("--sizes", type=sizes, default=default_sizes, help=f"batch sizes (default: {default_sizes})")
    made.add_argument("--compile", action="store_true", help="also under torch.compile, which takes a minute")
    made.add_argument("--parts", nargs="+", choices=("times", "bits"), default=["times", "bits"], help="default: both")
    made.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    made.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    made.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    asked = parser()
    given = asked.parse_args(argv)
    if find_spec("transformers") is None:
        asked.error("transformers is not installed: pip install transformers")
    if given.device == "cuda" and not torch.cuda.is_available():
        asked.error("--device: this PyTorch sees no GPU")
    report = Report(given)
    with ways(given) as found:
        if "times" in given.parts:
            measure(report, found, given)
        ours = bits(report, found, given) if "bits" in given.parts else 0
    show(report.found)
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
