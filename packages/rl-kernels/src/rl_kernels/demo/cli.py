"""The command ``rl-kernels demo``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from rl_kernels.core import BackendUnavailable
from rl_kernels.core.command import Parser, count, location, table, write_json
from rl_kernels.demo import parallel, plot, report
from rl_kernels.demo.report import Verdict, judged
from rl_kernels.demo.task import CPU, GPU, Settings
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.demo.ways import OURS, STOCK, Numerics
from rl_kernels.lab.bench.environment import environment

DESCRIPTION = """Train a small transformer with GRPO on the CPU, through the operators, and compare the log-probs of
rollout and training bit by bit. With --device cuda the model is a Llama of 104 million parameters on a GPU, trained a
second time in stock PyTorch beside it. With --parallel, under torchrun, it trains over ranks and again in one process,
and compares the weights. Exit status 1 if one bit differs, or if the reward has not clearly risen in the default number
of steps or more; a shorter run only shows it."""
WATCHED = (Numerics(STOCK, "BF16"), Numerics(STOCK, "FP32"), Numerics(OURS, "BF16"))
"""Measured beside the training of the small policy in FP32."""


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 if it showed what it is for, 1 if not, 2 for unusable arguments."""
    parser = Parser("rl-kernels demo", DESCRIPTION)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (%(default)s)")
    parser.add_argument("--out", type=location, default="rl-kernels-demo", help="folder to write to (%(default)s)")
    over_ranks = "over the ranks of torchrun, on the CPU: tensor or data parallelism"
    parser.add_argument("--parallel", choices=tuple(parallel.RANKS), help=over_ranks)
    default = f"of training ({CPU.steps}, on a GPU {GPU.steps}, with --parallel {parallel.STEPS})"
    parser.add_argument("--steps", type=count(1, 31), help=default)
    parser.add_argument("--seed", type=count(0, 63), default=CPU.seed, help="of weights and draws (%(default)s)")
    given = parser.parse_args(argv)
    if reason := unusable(given):
        parser.error(reason)
    settings = GPU if given.device == "cuda" else CPU
    steps = given.steps or (parallel.STEPS if given.parallel else settings.steps)
    settings = replace(settings, seed=given.seed, steps=steps)
    if not settings.llama:
        # With products this small, threads wait for each other longer than they work.
        torch.set_num_threads(1)
    try:
        if given.parallel:
            return 0 if parallel.run(settings, given.parallel) else 1
        return 0 if run(settings, given.device, given.out).passed else 1
    except BackendUnavailable as error:
        parser.error(f"--device: {' '.join(str(error).split())}")


def unusable(given: argparse.Namespace) -> str | None:
    """Say which argument cannot be used here, and why; make the folder, before time is spent on training."""
    if given.parallel:
        on_cpu = given.device == "cpu"
        reason = parallel.why_not(given.parallel) if on_cpu else "expected --device cpu; it shows bits, not speed"
        return reason and f"--parallel: {reason}"
    if given.device == "cuda" and find_spec("transformers") is None:
        return "--device: transformers is not installed: pip install transformers"
    if given.device == "cuda" and not torch.cuda.is_available():
        return "--device: this PyTorch sees no GPU: install a build of it for yours, or leave the option out"
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out: cannot write to {given.out}: {error.strerror}"
    return None if os.access(given.out, os.W_OK) else f"--out: cannot write to {given.out}: permission denied"


def run(settings: Settings, device: str, out: Path) -> Verdict:
    """Train, compare, print, and write ``curves.png`` and ``run.json`` into ``out``.

    A Llama is trained twice, by ours and in stock PyTorch; the small policy once, and compared further at the end.
    """
    start, runs, cases = time.perf_counter(), dict[str, list[Record]](), list[Record]()
    backends, parameters = dict[str, dict[str, str]](), 0
    for way in (OURS, STOCK) if settings.llama else (OURS,):
        trainer = Trainer(settings, way, device, watched=[Numerics(way, "FP32")] if settings.llama else WATCHED)
        parameters = sum(weight.numel() for weight in trainer.model.parameters())
        batch = f"{settings.prompts} prompts x {settings.samples_per_prompt} samples a step"
        print(f"GRPO, {way.name}: {parameters:,} parameters, random weights at first, {batch}.")
        print("4192= asks for 1249, the digits in ascending order.\n")
        runs[way.name] = report.train(trainer)
        backends |= trainer.backends
        cases += [] if settings.llama else compared(trainer)
    needed = (GPU if settings.llama else CPU).steps
    verdict = judged(runs[OURS.name], cases, needed)
    where = environment(torch.device(device), ("rl-kernels", "transformers"))
    document = {"model": {"parameters": parameters}, "environment": where, "settings": asdict(settings)}
    document |= {"backends": backends, "verdict": asdict(verdict), "comparison": cases, "runs": runs}
    write_json(out / "run.json", document)
    plot.draw(document, out / "curves.png")
    twice = ("the same run twice", *runs, report.QUOTIENT)
    print(table(twice, report.side_by_side(runs)) if settings.llama else report.comparison(cases))
    print(f"\n{verdict.told(needed)}")
    print(f"{out / 'curves.png'}, {out / 'run.json'} written; {time.perf_counter() - start:.0f} s\n{report.NEXT}")
    return verdict


def compared(trainer: Trainer) -> list[Record]:
    """Sample once more, and decode the tokens again in all numerics: all sequences together, and some alone."""
    batch = trainer.sample()
    size = len(batch.answers)
    return [
        {"numerics": each.name, "sequences": together, "gap": trainer.compare(each, batch, stride)}
        for each in (trainer.own, *trainer.watched[::-1])
        for together, stride in ((size, None), (1, -(-size // 16)))
    ]
