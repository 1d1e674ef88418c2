"""``rl-kernels audit``: arguments and exit status.

0: rows were compared and no bit differs. 1: the rows of a module differ. 2: bad arguments, or a model that cannot be
loaded or run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from os.path import expanduser
from typing import Any

import torch
from torch import nn

from rl_kernels.core.command import Parser, count
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.loading import load
from rl_kernels.models.audits import AuditResult, audit
from rl_kernels.models.checkpoints import Checkpoint, find
from rl_kernels.models.invariance import invariant
from rl_kernels.models.rollouts import cli as rollouts

DESCRIPTION = """Run a model on the same rows alone, batched, reordered, padded and in chunks, and name the first
module whose bits differ. With --rollout, compare the log-probs of rollout and training. Exit status 1 if one differs,
with --rollout if one differs under invariant()."""
USAGE = 2
PROMPTS = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the audit, print its report; return the exit status."""
    parser = Parser("rl-kernels audit", DESCRIPTION)
    parser.add_argument(
        "model",
        type=expanduser,
        help="folder or name of a causal language model of transformers; or MODULE:FUNCTION or file.py:function, "
        "which returns a model and its inputs: a list of prompts (1-D token ids), a tensor, or a tuple of tensors",
    )
    parser.add_argument("--invariant", action="store_true", help="audit the model under invariant()")
    parser.add_argument("--random-weights", action="store_true", help="random weights; reads only the configuration")
    parser.add_argument("--layers", type=count(1), metavar="N", help="keep the first N layers; needs --random-weights")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: fp32, with --rollout bf16; a function's model keeps its own"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    sizes = ", ".join(f"{name} {size}" for name, size in rollouts.PROMPTS.items())
    parser.add_argument("--prompts", type=count(2, 31), help=f"prompts to run ({PROMPTS}; with --rollout {sizes})")
    parser.add_argument(
        "--length", type=count(2, 31), help="tokens of the longest prompt (23; 131 for linear attention)"
    )
    parser.add_argument("--seed", type=count(0, 63), default=0, help="seed of random prompts and weights (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    rollouts.add_arguments(parser, count(1, 31))
    args = parser.parse_args(argv)
    if args.layers and not args.random_weights:
        parser.error("argument --layers: needs --random-weights")
    if reason := rollouts.unusable(args):
        parser.error(reason)
    try:
        model, inputs, checkpoint = _load_model(args)
        if args.rollout:
            return rollouts.run(args, model, inputs, checkpoint)
        with invariant(model) if args.invariant else nullcontext():
            result = audit(model, inputs, prompts=args.prompts or PROMPTS, length=args.length, seed=args.seed)
    except Exception as error:  # the user's model may raise anything
        message = " ".join(str(error).split())
        print(f"rl-kernels audit: {type(error).__name__}: {message}", file=sys.stderr)
        return USAGE
    print(json.dumps(asdict(result), indent=2, default=str) if args.json else "\n".join(text(result)))
    return 0 if result.passed else 1


def text(result: AuditResult) -> list[str]:
    """Return the lines of the report: one for each variant, then the culprit."""
    by_variant = {finding.variant: finding for finding in result.findings}
    lines = [
        f"{name}: {by_variant.get(name, 'bitwise identical to alone')}{_rerouted(result, name)}"
        for name in result.variants
    ]
    if result.skipped:
        lines.append(f"not compared, because their outputs have no rows: {', '.join(result.skipped)}")
    if result.culprit is None:
        if not any("token by token" in name for name in result.variants):
            lines.append("not tried: sequences in chunks, with a cache")
        return [*lines, f"PASSED: {result.compared} comparisons, no bit differs"]
    name = result.culprit.module or "the model"
    return [*lines, f"FAILED: the first module whose rows differ is {name} ({result.culprit.type})"]


def _rerouted(result: AuditResult, variant: str) -> str:
    if variant not in result.rerouted:
        return ""
    others, tokens = result.rerouted[variant]
    return f"; {others} of {tokens} tokens choose other experts"


def _load_model(args: Any) -> tuple[nn.Module, Any, Checkpoint | None]:
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    dtype, inputs, checkpoint = None if args.dtype is None else DTYPES[args.dtype], None, None
    if ":" in args.model:
        returned = load(args.model).function()
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], nn.Module):
            raise ValueError(f"model: expected {args.model} to return a model and its inputs")
        model, inputs = returned
    else:
        checkpoint = find(args.model)
        torch.manual_seed(args.seed)
        default = torch.bfloat16 if args.rollout else torch.float32
        model = checkpoint.load(dtype or default, random_weights=args.random_weights, layers=args.layers)
    return model.to(device=device, dtype=dtype), inputs, checkpoint
