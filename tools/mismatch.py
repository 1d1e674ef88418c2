"""Measure how a mismatch between rollout and training changes a run: `python tools/mismatch.py --jobs 14` on a CPU.

The policy, task and training of `rl-kernels demo`, for several seeds in each of five ways. All train in FP32, with
`grpo_loss`, from the same weights, prompts and draws:

- rl-kernels: rollout and training through the operators.
- plain FP32: both in plain PyTorch.
- BF16 rollout: sampled from a BF16 copy in plain PyTorch, as an inference engine would, trained in plain FP32. The old
  log-probs of the ratio are those of the rollout.
- FP8 rollout: the same, where the weights of the copy's layers, not its head, are rounded to FP8 (e4m3, one scale a
  weight), as a quantized engine does.
- FP8, recomputed: the same rollout, but the old log-probs are computed again by a training pass, as trainers do that
  take only tokens from the engine. The ratio then says nothing of the mismatch, and starts at 1.

Written are, for each run and stretch of steps: reward, share solved, KL and largest |ratio - 1| between rollout and
first training pass, whose weights are the same, and the share of tokens that are clipped before any update. These
rewards are of the rollout, which FP8 weights alone may make worse; so each run ends with an evaluation: the reward of
answers that are sampled in plain FP32 to prompts that are the same for all runs. The seeds are 0, 1, 2 and so on.
`--read` draws and prints a record again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from sections.mismatch import draw, table
from torch import nn

from rl_kernels.core.command import Parser, count, location, writable, write_json
from rl_kernels.demo import task
from rl_kernels.demo.model import make
from rl_kernels.demo.task import Settings
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.demo.ways import Batch, Ours, Stock, sample, training_logps
from rl_kernels.lab.bench.environment import environment

FP8 = torch.float8_e4m3fn
STRETCH = 10
"""Steps per entry of a record, which has the mean of each measure, but the largest ratio."""
SETTINGS = Settings(steps=400, characters="".join(map(chr, range(256))))
EVALUATION, EVALUATED = 1 << 20, 2048
"""Seed and number of prompts of the evaluation."""


class Plain(Stock):
    """Stock PyTorch, but for the loss, which is the same in all ways."""

    loss = Ours.loss


class Fp8(Plain):
    """Stock PyTorch, with weights of the layers that went through FP8."""

    def load(self, model: nn.Module, masters: Sequence[torch.Tensor]) -> None:
        """Load weights, those of the layers through FP8, with one scale for each weight."""
        for (name, weight), master in zip(model.named_parameters(), masters, strict=True):
            rounded = master.detach()
            if name.startswith("blocks.") and weight.ndim == 2:
                scale = rounded.abs().max() / torch.finfo(FP8).max
                rounded = (rounded / scale).to(FP8).float() * scale
            weight.copy_(rounded)


class Recomputing(Trainer):
    """Takes old log-probs from a training pass, as if a rollout gave only tokens."""

    @torch.no_grad()
    def scored(self, batch: Batch) -> Batch:
        """Return a rollout with its rewards, and log-probs of the policy as it trains."""
        return super().scored(batch)._replace(old=training_logps(self.model, batch, self.own))


PLAIN = Plain("FP32")


class Way(NamedTuple):
    """The classes with which a run samples and trains, and its trainer."""

    rollout: Stock
    training: type[Stock]
    trainer: type[Trainer] = Trainer


WAYS = {
    "rl-kernels": Way(Ours("FP32"), Ours),
    "plain FP32": Way(PLAIN, Plain),
    "BF16 rollout": Way(Plain("BF16"), Plain),
    "FP8 rollout": Way(Fp8("BF16"), Plain),
    "FP8, recomputed": Way(Fp8("BF16"), Plain, Recomputing),
}
MEASURES = "reward", "solved", "kl", "largest", "clipped_at_once"


def train(name: str, settings: Settings) -> dict[str, Any]:
    """Train in one way with one seed, on one thread; return its record."""
    torch.set_num_threads(1)
    way = WAYS[name]
    trainer = way.trainer(settings, way.training, rollout=way.rollout)
    history = [trainer.step(step) for step in range(1, settings.steps + 1)]
    stretches = [history[first : first + STRETCH] for first in range(0, len(history), STRETCH)]
    measures = {measure: [_together(measure, steps) for steps in stretches] for measure in MEASURES}
    seconds, evaluated = (
        round(sum(metrics["seconds"] for metrics in history), 1),
        evaluation(settings, trainer.masters),
    )
    return {
        **{"way": name, "seed": settings.seed, "seconds": seconds, "evaluated": evaluated},
        **{"steps": [steps[-1]["step"] for steps in stretches]},
        **measures,
    }


def evaluation(settings: Settings, weights: Sequence[torch.Tensor]) -> float:
    """Return the mean reward of answers to the prompts of the evaluation, sampled in plain FP32."""
    source = random.Random(EVALUATION)
    prompts = [task.draw_prompt(source, settings) for _ in range(EVALUATED)]
    policy = make(settings, torch.device("cpu"), "FP32").requires_grad_(False)
    with torch.no_grad():
        PLAIN.load(policy, weights)
    batch = sample(policy, prompts, PLAIN, settings, torch.Generator().manual_seed(EVALUATION), slice(None))
    return round(fmean(task.reward(*pair) for pair in batch.answers), 4)


def _together(measure: str, steps: Sequence[Record]) -> float:
    values = [step[measure] for step in steps]
    return float(f"{max(values) if measure == 'largest' else fmean(values):.4g}")


def run(settings: Settings, seeds: int, jobs: int, console: Console) -> list[dict[str, Any]]:
    """Train in every way with every seed, some at a time; return the records, by way and seed."""
    jobs_to_run = [(name, replace(settings, seed=seed)) for name in WAYS for seed in range(seeds)]
    if jobs == 1:
        records = [_announced(train(*job), console) for job in jobs_to_run]
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            waiting = [pool.submit(train, *job) for job in jobs_to_run]
            records = [_announced(job.result(), console) for job in waiting]
    return records


def _announced(record: dict[str, Any], console: Console) -> dict[str, Any]:
    last = f"reward {record['reward'][-1]:.3f} at the end, {record['seconds']:.0f} s"
    console.print(f"{record['way']}, seed {record['seed']}: {last}", highlight=False)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Train or read a record, print it, and write the requested files; return the exit status."""
    args = arguments(argv)
    console = Console(width=120 if not sys.stdout.isatty() else None)
    if args.read is not None:
        document = args.read
    else:
        settings = replace(SETTINGS, steps=args.steps)
        machine = environment(torch.device("cpu"), ("rl-kernels",)) | {"threads": "1"}
        runs = run(settings, args.seeds, args.jobs, console)
        shared = {key: value for key, value in asdict(settings).items() if key != "seed"}
        document = {"settings": shared, "seeds": args.seeds, "environment": machine, "runs": runs}
    print(table(document["runs"]))
    if args.json is not None:
        write_json(args.json, document)
    if args.plot is not None:
        draw(document, args.plot)
    return 0


def record(text: str) -> dict[str, Any]:
    """Return a record that was written: an argument type."""
    try:
        document = json.loads(location(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a record of this tool, got {text!r}: {error}") from error
    assert isinstance(document, dict)
    return document


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = Parser("mismatch.py", __doc__.splitlines()[0])
    parser.add_argument("--steps", type=count(1), default=SETTINGS.steps, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=count(1), default=8, help="runs of each way (%(default)s)")
    parser.add_argument("--jobs", type=count(1), default=1, help="runs at a time, a process each (%(default)s)")
    parser.add_argument("--json", type=writable, help="where the record goes")
    parser.add_argument("--plot", type=writable, help="where the picture goes")
    parser.add_argument("--read", type=record, help="a record to print and draw, in place of training")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
