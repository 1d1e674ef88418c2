"""``rl-kernels audit --rollout``: its arguments, and its run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any

import torch

from rl_kernels.core.command import install_hint, json_rows, location, number, writable
from rl_kernels.models.audits import random_prompts
from rl_kernels.models.checkpoints import SMOLLM2, Checkpoint
from rl_kernels.models.rollouts import prompts, recorded, report
from rl_kernels.models.rollouts.audit import audit_rollouts, check_model
from rl_kernels.models.rollouts.counts import BOUNDS, CLIP, DISTANCES
from rl_kernels.models.rollouts.samples import Sample

OPTIONS = ("tokens", "temperature", "bounds", "clip", "recorded", "plot")
"""Options of the audit that need ``--rollout``."""
ELSEWHERE = ("invariant", "length")
"""Options of the audit of batches alone."""
PROMPTS, TOKENS = {"cpu": 16, "cuda": 64}, {"cpu": 32, "cuda": 128}
"""Sizes by device: for SmolLM2 less than a minute."""


def add_arguments(parser: argparse.ArgumentParser, tokens: Any) -> None:
    """Add the arguments; ``tokens`` is the type of a count."""
    group = parser.add_argument_group("rollout against training")
    group.add_argument(
        "--rollout",
        action="store_true",
        help="sample completions of chat prompts, score them as training does, stock and under invariant(), and "
        "count the tokens whose log-prob differs; the model may be smollm2, too",
    )
    sizes = ", ".join(f"{name} {size}" for name, size in TOKENS.items())
    group.add_argument("--tokens", type=tokens, help=f"most tokens of a completion ({sizes})")
    group.add_argument("--temperature", type=number(above=0), help="divides the logits (1)")
    low, high = BOUNDS
    group.add_argument(
        "--bounds",
        type=number(least=0),
        nargs=2,
        metavar=("LOW", "HIGH"),
        help=f"count ratios outside of these ({low:g} {high:g})",
    )
    group.add_argument("--clip", type=number(least=0), help=f"count ratios further than this from 1 ({CLIP:g})")
    group.add_argument(
        "--recorded",
        type=location,
        metavar="FILE",
        help="compare with these log-probs of another stack: JSON lines with prompt_ids, completion_ids and logprobs",
    )
    group.add_argument("--plot", type=writable, metavar="FILE", help="write a picture: PNG, SVG or PDF, by its name")


def unusable(args: argparse.Namespace) -> str | None:
    """Say which argument cannot be used, and why."""
    for name in OPTIONS if not args.rollout else ELSEWHERE:
        if getattr(args, name) not in (None, False):
            return f"argument --{name}: {'needs --rollout' if name in OPTIONS else 'is not for --rollout'}"
    if args.bounds and args.bounds[0] > args.bounds[1]:
        return f"argument --bounds: expected LOW <= HIGH, got {args.bounds[0]:g} {args.bounds[1]:g}"
    if args.recorded and (args.prompts or args.tokens):
        return "argument --recorded: its file says which prompts and tokens"
    if args.plot and find_spec("matplotlib") is None:
        return "argument --plot: matplotlib is not installed: pip install matplotlib"
    if args.plot and find_spec("rl_kernels.lab") is None:
        return f"argument --plot: rl-kernels-lab is not installed; {install_hint('rl-kernels-lab')}"
    return None


def run(args: argparse.Namespace, model: Any, inputs: Any, checkpoint: Checkpoint | None) -> int:
    """Audit the rollouts of a model, print and draw the result; return the exit status."""
    start = time.perf_counter()
    check_model(model)
    if args.model == SMOLLM2:
        # Threads gain little with products this small, and lose much where other processes run.
        torch.set_num_threads(1)
    options: dict[str, Any] = {
        "temperature": args.temperature or 1.0,
        "bounds": tuple(args.bounds or BOUNDS),
        "clip": CLIP if args.clip is None else args.clip,
    }
    sampling = {"tokens": args.tokens or TOKENS[_kind(model)], "seed": args.seed}
    rollout = recorded.read(args.recorded) if args.recorded else _prompts(args, model, inputs, checkpoint)
    result = audit_rollouts(model, rollout, **options, **sampling, progress=lambda line: print(line, file=sys.stderr))
    settings = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": _device_name(model.device),
        **options,
        **({} if args.recorded else sampling),
    }
    if args.plot:
        report.draw(result.counts, settings, args.plot)
    seconds = time.perf_counter() - start
    if args.json:
        print(json_rows({**record(result, settings, rollout), "seconds": round(seconds, 1)}))
    else:
        print("\n".join(report.text(result, settings)))
        print(f"{seconds:.0f} s" + (f"; {args.plot} written" if args.plot else ""))
    return 0 if result.passed else 1


def record(result: Any, settings: dict[str, Any], rollout: Sequence[torch.Tensor | Sample]) -> dict[str, Any]:
    """Return the result as JSON has it."""
    lengths = [len(each.prompt if isinstance(each, Sample) else each) for each in rollout]
    from transformers import __version__

    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {
        "settings": settings,
        "environment": {
            "device": settings["device"],
            "date": date,
            "torch": torch.__version__,
            "transformers": __version__,
        },
        "samples": result.samples,
        "is_recorded": result.is_recorded,
        "prompt_tokens": [min(lengths), max(lengths)],
        "distances": DISTANCES,
        "counts": {
            way: {name: asdict(counts) for name, counts in by_batch.items()} for way, by_batch in result.counts.items()
        },
    }


def _prompts(args: argparse.Namespace, model: Any, inputs: Any, checkpoint: Checkpoint | None) -> list[torch.Tensor]:
    if inputs is not None:
        return list(inputs)
    count = args.prompts or PROMPTS[_kind(model)]
    tokenizer = None if checkpoint is None else checkpoint.tokenizer()
    rows = None if tokenizer is None else prompts.chat(tokenizer, count)
    if rows is not None:
        return rows
    print("no tokenizer: prompts are random tokens", file=sys.stderr)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return random_prompts(vocabulary, count, 48, args.seed)


def _kind(model: Any) -> str:
    return "cpu" if model.device.type == "cpu" else "cuda"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type).upper()
