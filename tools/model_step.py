"""A whole model, stock and under `invariant()`: time and bits; `python tools/model_step.py` on a GPU.

The model has random weights and, by default, the widths of Llama 3.1 8B with four of its layers; `--widths` gives it
those of a mixture of experts or of a hybrid. Only its body runs, without the head. It runs unchanged (SDPA; a hybrid
with FLA, if it is installed), under torch.compile, with Liger's kernels if they are installed, under `invariant()`, and
under both. Times are wall times of several calls, host included, with a wait for the device after the last one; the
ways take turns, and the ratios are of medians. Decoding is one token per sequence with a static cache, in a CUDA graph;
`generate` is eager, with one prompt; `generate_batch` is transformers' continuous batching with its default settings.

Bits: how many elements of the logits, and of the log-probabilities of `head_logp`, differ between prompts alone and the
same prompts in batches, padded, packed, in chunks and so on; the gradients of a packed and of a padded batch; and for a
mixture the tokens with other experts, and by how much their log-probabilities differ.

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
from model_bits import LONGEST, differing, gradients, prompts
from model_continuous import ANSWER, batched
from model_decode import captured, decoding, generated
from model_ways import (
    HYBRIDS,
    OURS,
    STOCK,
    Way,
    layer_profile,
    ways,
)
from rich.console import Console
from rich.table import Table

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.contract import DTYPES
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import extra_memory
from rl_kernels.lab.bench.peers import one_line
from rl_kernels.lab.bench.report import digits

PACKAGES = ("transformers", "rl-kernels-models", "rl-kernels-det-gemm", "rl-kernels-attention", "rl-kernels-norm")
PEERS = {"liger_kernel": "liger_kernel", "fla": "fla-core"}
"""Packages that some ways use, by module."""
FAMILIES = ("Llama", "Qwen3Moe", "GptOss", *HYBRIDS)
WIDTHS = {
    "qwen3-30b": {"family": "Qwen3Moe", "hidden": 2048, "between": 768, "experts": 128, "chosen": 8, "kv_heads": 4},
    "gpt-oss-20b": {"family": "GptOss", "hidden": 2880, "between": 2880, "experts": 32, "chosen": 4}
    | {"heads": 64, "head": 64},
    "qwen3.5-9b": {"family": "Qwen3_5", "hidden": 4096, "between": 12288, "layers": 8}
    | {"heads": 16, "kv_heads": 4, "head": 256},
    "qwen3.5-35b": {"family": "Qwen3_5Moe", "hidden": 2048, "between": 512, "layers": 8}
    | {"heads": 16, "kv_heads": 2, "head": 256, "experts": 256, "chosen": 8},
}
"""Widths of Qwen3-30B-A3B, gpt-oss-20b, Qwen3.5-9B and Qwen3.5-35B-A3B."""
SECONDS = 0.15
"""Length of one turn of calls."""
BOTH = (1 << 11, 1 << 13)
"""Batches with this many tokens run backward too."""


def in_turn(calls: Mapping[str, tuple[Way, Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Return the milliseconds of each call: the median over rounds in which the calls take turns."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, (way, call) in calls.items():
        with way.active():
            _timed(call, 2)
            counts[name] = max(1, min(200, round(SECONDS / _timed(call, 1))))
    for _ in range(rounds):
        for name, (way, call) in calls.items():
            with way.active():
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
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    except ValueError:
        pairs = [()]
    if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2x1024,4x2048, got {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]


class Report:
    """The results, written to a file after each part, because later parts may fail."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        machine = environment(torch.device(args.device), [*PACKAGES, *_installed_peers()])
        self.document: dict[str, Any] = {
            "version": 1,
            "environment": machine,
            "settings": settings,
            "ms": {},
            "failed": {},
        }
        self._file: Path | None = args.json

    def keep(self, part: str, name: str, value: Any) -> None:
        """Add the result of one part."""
        self.document.setdefault(part, {})[name] = value
        if self._file is not None:
            write_json(self._file, self.document)

    def times(self, name: str, calls: Mapping[str, tuple[Way, Callable[[], Any]]], rounds: int) -> None:
        """Time calls in turn, and keep the times; calls that fail are recorded and left out."""
        working = {}
        for who, (way, call) in calls.items():
            try:
                with way.active():
                    _timed(call, 1)
                working[who] = way, call
            except Exception as error:  # Record it, and time the others.
                self.keep("failed", f"{name}, {who}", one_line(error))
        milliseconds = in_turn(working, rounds)
        self.keep("ms", name, milliseconds)
        stock = milliseconds.get(STOCK)
        line = ", ".join(
            f"{who} {digits(ms)}" + (f" ({ms / stock:.2f})" if stock else "") for who, ms in milliseconds.items()
        )
        print(f"{name}: {line}", flush=True)


def _installed_peers() -> list[str]:
    return [name for module, name in PEERS.items() if find_spec(module)]


def measure(report: Report, ways_to_time: Sequence[Way], args: argparse.Namespace) -> None:
    """Time every pass."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    for batch, tokens in args.sizes:
        ids = torch.randint(1, args.vocab, (batch, tokens), device=device)
        label = f"{batch}x{tokens}"
        forward = {way.name: (way, lambda way=way, ids=ids: way.forward(ids)) for way in ways_to_time}
        report.times(f"forward {label}", forward, args.rounds)
        if batch * tokens in BOTH or args.device == "cpu":
            above = torch.randn(batch, tokens, args.hidden, device=device, dtype=dtype)
            both = {way.name: (way, lambda way=way, ids=ids, up=above: way.both(ids, up)) for way in ways_to_time}
            report.times(f"forward + backward {label}", both, args.rounds)
            for name, (way, step) in both.items() if args.device == "cuda" else ():
                with way.active():
                    report.keep("memory", f"{label}, {name}", extra_memory(step, device))
        for way in ways_to_time:
            way.model.zero_grad(set_to_none=True)
    plain = [way for way in ways_to_time if way.body is way.model.model]
    if args.device == "cuda":
        ids = torch.randint(1, args.vocab, args.sizes[-1], device=device)
        for way in plain:
            with way.active():
                report.keep("profile", way.name, layer_profile(way, ids))
    steps = {}
    for way in plain:
        try:
            with way.active():
                step = decoding(way, args.decoded, args.keys)
                steps[way.name] = way, captured(step) if args.device == "cuda" else step
        except Exception as error:  # As above.
            report.keep("failed", f"decode, {way.name}", one_line(error))
    suffix = ", CUDA graph" if args.device == "cuda" else ""
    report.times(f"decode, {args.decoded} sequences, {args.keys} keys{suffix}", steps, args.rounds)
    steps.clear()
    eager = {way.name: (way, generated(way, args.generated)) for way in plain}
    report.times(f"generate, 1 prompt, {args.generated} tokens, eager", eager, max(args.rounds // 2, 1))
    prompt_ids = prompts(args)
    # transformers has no continuous batching of hybrids.
    if args.family not in HYBRIDS:
        together = {
            way.name: (way, batched(way.model, prompt_ids, ANSWER)) for way in ways_to_time if way.name in (STOCK, OURS)
        }
        report.times(f"generate_batch, {args.prompts} prompts, {ANSWER} tokens", together, 1)


def bits(report: Report, all_ways: Sequence[Way], args: argparse.Namespace) -> int:
    """Count differing elements of the ways that are not compiled; return the count of ours."""
    prompt_ids, ours = prompts(args), 0
    for way in all_ways:
        if way.name not in (STOCK, OURS):
            continue
        with way.active():
            differ, refused = differing(way, prompt_ids, continuous=args.family not in HYBRIDS)
            # A stock hybrid has packed rows with FLA alone.
            of_gradients = None if "packed" in refused else gradients(way, args)
        report.keep("bits", way.name, {"prompts": differ, "gradients": of_gradients, "refused": refused})
        if way.name == OURS:
            counted = ("logits", "logps", "experts")
            ours = sum(counts[name] for counts in differ.values() for name in counted) + of_gradients["differ"]
    return ours


def show(document: dict[str, Any]) -> None:
    """Print the bits, then the times and their ratios to the stock model's."""
    for way, counted in document.get("bits", {}).items():
        for name, counts in counted["prompts"].items():
            print(
                f"{way}, {name}: {counts['logits']:,} of {counts['of_logits']:,} logits and {counts['logps']:,} of "
                f"{counts['of_logps']:,} log-probabilities differ{_rerouted(counts)}"
            )
        for name, reason in counted["refused"].items():
            print(f"{way}, {name}: {reason}")
        if counts := counted["gradients"]:
            print(f"{way}, gradients packed and padded: {counts['differ']:,} of {counts['elements']:,} differ")
    for way, parts in document.get("profile", {}).items():
        print(f"{way}, ms of a layer: " + ", ".join(f"{name} {digits(ms)}" for name, ms in parts.items()))
    for name, mib in document.get("memory", {}).items():
        print(f"peak of forward + backward beside weights and gradients, {name}: {mib:,.0f} MiB")
    for name, reason in document["failed"].items():
        print(f"failed: {name}: {reason}")
    print("ran on " + ", ".join(f"{name} {value}" for name, value in document["environment"].items()))
    rows = document["ms"]
    names = list(dict.fromkeys(name for times in rows.values() for name in times))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(("ms", *names)):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row, times in rows.items():
        table.add_row(row, *(_cell(times, name) for name in names))
    Console(width=160).print(table)


def _rerouted(counts: Mapping[str, Any]) -> str:
    """Return the tokens of a mixture with other experts, and by how much their log-probabilities differ."""
    if not counts["of_tokens"]:
        return ""
    others = f"{counts['experts']:,} of {counts['of_tokens']:,} tokens choose other experts"
    moves = (
        f"{each['mean']:.1e} (at most {each['largest']:.1e}) with {kind}" for kind, each in counts["moves"].items()
    )
    return f"; {others}; moved by {', '.join(moves)}"


def _cell(milliseconds: Mapping[str, float], name: str) -> str:
    if name not in milliseconds:
        return ""
    ratio = f" ({milliseconds[name] / milliseconds[STOCK]:.2f})" if name != STOCK and STOCK in milliseconds else ""
    return digits(milliseconds[name]) + ratio


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("model_step.py", "Time a model with random weights, stock and under invariant(), and compare bits.")
    numbers = {"layers": 4, "hidden": 4096, "between": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}
    numbers |= {"prompts": 32, "longest": LONGEST, "decoded": 64, "keys": 2048, "generated": 64, "rounds": 7}
    for name, default in numbers.items():
        flag = "--" + name.replace("_", "-")
        cli.add_argument(flag, type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--family", choices=FAMILIES, default=FAMILIES[0], help=f"default: {FAMILIES[0]}")
    for name, default in {"experts": 128, "chosen": 8, "head": 128}.items():
        text = f"of a mixture or hybrid; default: {default}"
        cli.add_argument(f"--{name}", type=count(1), default=default, metavar="N", help=text)
    cli.add_argument("--widths", choices=WIDTHS, help="the family and widths of a model")
    default_sizes = "2x1024,4x2048,1x8192,1x16384"
    cli.add_argument("--sizes", type=sizes, default=default_sizes, help=f"batch sizes (default: {default_sizes})")
    cli.add_argument("--compile", action="store_true", help="also under torch.compile, which takes a minute")
    cli.add_argument("--parts", nargs="+", choices=("times", "bits"), default=["times", "bits"], help="default: both")
    cli.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    cli.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.widths:
        vars(args).update(WIDTHS[args.widths])
    if find_spec("transformers") is None:
        cli.error("transformers is not installed: pip install transformers")
    if args.device == "cuda" and not torch.cuda.is_available():
        cli.error("--device: this PyTorch sees no GPU")
    report = Report(args)
    with ways(args) as all_ways:
        if "times" in args.parts:
            measure(report, all_ways, args)
        ours = bits(report, all_ways, args) if "bits" in args.parts else 0
    show(report.document)
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
