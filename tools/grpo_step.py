"""A GRPO step of transformers' Llama, eager and through the operators: `python tools/grpo_step.py` on a GPU.

The model has random weights and, by default, the sizes of Llama 3.2 1B with four of its layers. A step is the forward
pass through its body, the log-probabilities of the tokens, the GRPO loss and the backward pass, without an optimizer.
Both ways share the body, the tokens and the positions. `eager` holds all logits, takes their log-softmax in FP32 and
the loss in plain PyTorch, as the benchmarks of the two operators define it. Ours is `linear_logp`, which ignores tokens
outside of completions, and `grpo_loss`, which masks them. The two are compared before either is timed, and the
comparison must detect a fault that is planted in ours. Other forms of ours: all logits kept (`saved_mib`), statistics
of an earlier pass without gradients (`known`, eight rows of which are recomputed), and loss and gradients of the head
in chunks (`linear_logp_loss` with `sequence_losses`).

Peak extra memory is the most that a step allocates at once beyond parameters, gradients and inputs, which exist before
it: activations, logits or workspace, and each new gradient until it is added to its buffer. The largest batch is the
largest number of whole groups whose step runs twice under a limit of all memory that PyTorch reserves; parameters,
gradients and inputs count, but there is no optimizer.

Exit status: 1 if the two disagree or the planted fault is not detected; nothing is timed then. 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from grpo_policy import Batch, Policy
from rich.console import Console
from rich.table import Table

from rl_kernels.core.command import Parser, count, writable, write_json
from rl_kernels.core.dispatch import AUTO, BackendUnavailable, record_dispatch
from rl_kernels.lab.bench.environment import environment
from rl_kernels.lab.bench.measure import Effort, Timing, measure
from rl_kernels.lab.bench.peers import LOOSE, difference, one_line
from rl_kernels.lab.bench.report import digits
from rl_kernels.lab.check.guard import Results
from rl_kernels.linear_logp.op import OPERATOR

EAGER, OURS = "eager", "rl-kernels"
KEPT, KNOWN, CHUNKS = (f"{OURS}, {form}" for form in ("saved_mib", "known", "linear_logp_loss"))
TOLERANCE = {"fp32": 5e-5, "bf16": LOOSE}
"""Tolerance of the loss, whose terms are of order 1, and of each parameter's gradient as a share of its norm. In FP32
the two ways differ only in the order of sums: 1e-6 on a CPU. In BF16 eager rounds its logits, and the body rounds the
gradients of both: 1.2e-2 on a CPU."""
PLANTED = 1.05
"""The planted temperature; on a CPU it moves a gradient by 0.12 or more."""
PACKAGES = ("transformers", "rl-kernels-linear-logp", "rl-kernels-grpo-loss")

Way = Callable[[Batch], torch.Tensor]


class Wrong(Exception):
    """The two ways disagree, or a planted fault was not detected."""


def distance(policy: Policy, loss: torch.Tensor, expected: Results) -> tuple[str, float]:
    """Return the name of the last step's result that is farthest from the expected one, and its distance."""
    off = abs(float(loss) - float(expected["loss"]))
    name, share = difference(policy.gradients(), expected)
    # NaN counts as infinitely far.
    return (f"gradient of {name}", share) if off <= share else ("loss", math.inf if math.isnan(off) else off)


def close(policy: Policy, loss: torch.Tensor, expected: Results, tolerance: float) -> tuple[str, float]:
    """Return the distance; ``Wrong`` if it is over the tolerance."""
    name, far = distance(policy, loss, expected)
    if not far <= tolerance:
        raise Wrong(f"{name} is off by {far:.2g} (tolerance {tolerance:g})")
    return name, far


def compare(policy: Policy, batch: Batch, expected: Results, tolerance: float) -> dict[str, Any]:
    """Compare our step with the eager one, and check that a planted fault is detected; ``Wrong`` otherwise."""
    with record_dispatch() as log:
        name, far = close(policy, policy.ours(batch), expected, tolerance)
    _, planted_off = distance(policy, policy.ours(batch, PLANTED), expected)
    if planted_off <= tolerance:
        raise Wrong(
            f"a planted temperature of {PLANTED} was not seen: off by {planted_off:.2g} (tolerance {tolerance:g})"
        )
    backends = {choice.operator: choice.backend for choice in log}
    return {"tolerance": tolerance, "farthest": name, "off": far, "planted_off": planted_off, "backends": backends}


def timed(policy: Policy, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Timing]]:
    """Compare our step with the eager one on a batch; time all forms of it, and compare the last step of each."""
    batch, tolerance = policy.batch(args.prompts), TOLERANCE[args.dtype]
    expected = {"loss": policy.eager(batch)}
    expected |= {name: value.clone() for name, value in policy.gradients().items()}
    checked, timings = compare(policy, batch, expected, tolerance), {}
    ways = {EAGER: policy.eager, OURS: policy.ours, KEPT: policy.saved_logits, CHUNKS: policy.chunks}
    ways[KNOWN] = partial(policy.known, statistics=policy.statistics(batch))
    for name, way in ways.items():
        timings[name], loss, *_ = measure([partial(way, batch)], policy.device, Effort(), captured=False)
        close(policy, loss, expected, tolerance)
    return checked, timings


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, or 0: double from 1 on, then bisect."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits(policy: Policy, way: Way, prompts: int) -> bool:
    """Return whether a step fits into memory twice in a row; free its memory."""
    fitted = _attempt(policy, way, prompts)
    gc.collect()
    torch.cuda.empty_cache()
    return fitted


def _attempt(policy: Policy, way: Way, prompts: int) -> bool:
    try:
        batch = policy.batch(prompts)
        for _ in range(2):
            way(batch)
    except torch.OutOfMemoryError:
        return False
    return True


def sequences(policy: Policy, args: argparse.Namespace) -> dict[str, int]:
    """Return the number of sequences that fit under the limit, for both ways; {} without a GPU or a limit."""
    if policy.device.type != "cuda" or not args.limit_gib:
        return {}
    limit = args.limit_gib * 2**30 / torch.cuda.get_device_properties(policy.device).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        ways = {EAGER: policy.eager, OURS: policy.ours}
        return {name: args.samples * largest(partial(fits, policy, way)) for name, way in ways.items()}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def show(document: dict[str, Any], mib: float) -> None:
    """Print the comparison and the environment, then the table."""
    settings, checked, steps = document["settings"], document["checked"], document["steps"]
    sizes = (
        f"{settings['layers']} layers, hidden {settings['hidden']}, vocabulary {settings['vocab']}, {settings['dtype']}"
    )
    print(f"Llama with random weights: {sizes}; parameters and gradients: {digits(mib)} MiB")
    print(f"{settings['prompts']} prompts, {settings['samples']} samples each, {settings['tokens']} tokens a sequence")
    print(f"{checked['farthest']} differs most, by {checked['off']:.2g}, tolerance {checked['tolerance']:g}")
    print(f"a planted temperature of {PLANTED} is seen, off by {checked['planted_off']:.2g}")
    print("backends: " + ", ".join(f"{operator} {name}" for operator, name in checked["backends"].items()))
    print("ran on " + ", ".join(f"{name} {value}" for name, value in document["environment"].items()))
    table = Table(box=None, padding=(0, 2, 0, 0))
    labels = {"ms": f"step, ms ({steps[OURS]['how']})", "extra_mib": "peak extra MiB"}
    labels["largest"] = f"sequences in {settings['limit_gib']:g} GiB"
    for i, name in enumerate(("", *(column for label in labels.values() for column in (label, "/ eager")))):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for name, step in steps.items():
        cells = (cell for key in labels for cell in _cells(step[key], steps[EAGER][key]))
        table.add_row(name, *cells)
    Console(width=140).print(table)


def _cells(value: float | None, eager: float | None) -> tuple[str, str]:
    if value is None:
        return "not measured", ""
    return str(value) if isinstance(value, int) else digits(value), f"{value / eager:.2f}" if eager else ""


def limit(text: str) -> float:
    """Return a number of GiB: an argument type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text!r}")
    return value


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser("grpo_step.py", "Time a GRPO step of a Llama with random weights, eager and through the operators.")
    sizes = {"layers": 4, "hidden": 2048, "heads": 32, "vocab": 128256, "prompts": 2}
    for name, default in sizes.items():
        cli.add_argument(f"--{name}", type=count(1), default=default, metavar="N", help=f"default: {default}")
    cli.add_argument("--samples", type=count(2), default=8, metavar="N", help="size of a group (default: 8)")
    cli.add_argument("--tokens", type=count(2), default=512, metavar="N", help="per sequence (default: 512)")
    cli.add_argument("--checkpointing", action="store_true", help="recompute the body's activations in backward")
    cli.add_argument("--dtype", choices=tuple(TOLERANCE), default="bf16", help="default: bf16")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    cli.add_argument("--seed", type=count(0), default=0, metavar="N", help="default: 0")
    backends = (AUTO, *(backend.name for backend in OPERATOR.backends))
    cli.add_argument("--backend", choices=backends, default=AUTO, help="backend of linear_logp (default: auto)")
    most = "memory limit for the search of the largest batch; 0: no search (default: 40)"
    cli.add_argument("--limit-gib", type=limit, default=40.0, metavar="GIB", help=most)
    cli.add_argument("--json", type=writable, metavar="FILE", help="also write the results as JSON")
    return cli


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; exit with status 2 if they cannot be used here."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.hidden % (2 * args.heads):
        cli.error(f"--hidden: expected a multiple of twice --heads ({2 * args.heads}), got {args.hidden}")
    if find_spec("transformers") is None:
        cli.error("transformers is not installed: pip install transformers")
    if args.device == "cuda":
        if not torch.cuda.is_available():
            cli.error("--device: this PyTorch sees no GPU")
        there = torch.cuda.get_device_properties(0).total_memory / 2**30
        if args.limit_gib > there:
            cli.error(f"--limit-gib: expected at most the {there:.1f} GiB of this GPU, got {args.limit_gib:g}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = arguments(argv)
    try:
        policy = Policy(args)
        checked, timings = timed(policy, args)
    except Wrong as error:
        print(f"WRONG, no speed: {error}", file=sys.stderr)
        return 1
    except (BackendUnavailable, torch.OutOfMemoryError) as error:
        parser().error(one_line(error))
    steps = {name: {**asdict(timing), "largest": None} for name, timing in timings.items()}
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    machine = environment(policy.device, PACKAGES)
    document = {"version": 1, "environment": machine, "settings": settings, "checked": checked, "steps": steps}
    _write(document, args.json)
    for name, sequence_count in sequences(policy, args).items():
        steps[name]["largest"] = sequence_count
    _write(document, args.json)
    show(document, policy.mib)
    return 0


def _write(document: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        write_json(file, document)


if __name__ == "__main__":
    sys.exit(main())
