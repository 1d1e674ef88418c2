"""The command ``rl-kernels demo``."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from rl_kernels.core import BackendUnavailable, record_dispatch
from rl_kernels.core.command import Parser, count, location
from rl_kernels.demo import plot, record, report, task
from rl_kernels.demo.compare import Comparison, compare
from rl_kernels.demo.gpu import run as gpu
from rl_kernels.demo.gpu import settings as gpu_settings
from rl_kernels.demo.numerics import OURS_BF16, OURS_FP32, PLAIN_BF16, PLAIN_FP32
from rl_kernels.demo.parallel import run as parallel
from rl_kernels.demo.parallel.trainers import WAYS
from rl_kernels.demo.train import Settings, StepMetrics, Trainer
from rl_kernels.demo.verdict import Verdict, judge

DESCRIPTION = """Train a small transformer with GRPO on the CPU, through the operators, and compare the log-probs of
rollout and training bit by bit. With --device cuda the model is a Llama of 104 million parameters on a GPU, trained a
second time in stock PyTorch beside it. With --parallel, under torchrun, it trains over ranks and again in one process,
and compares the weights. Exit status 1 if one bit differs, or if the reward has not clearly risen in the default number
of steps or more; a shorter run only shows it."""
WATCHED = (OURS_BF16, PLAIN_FP32, PLAIN_BF16)
"""Measured beside the FP32 training through the operators."""
SHOWN = 8
"""Sampled answers that are printed."""


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 if it showed what it is for, 1 if not, 2 for unusable arguments."""
    parser = Parser("rl-kernels demo", DESCRIPTION)
    defaults = Settings()
    out = Path("rl-kernels-demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (%(default)s)")
    parser.add_argument("--out", type=location, default=out, help="folder to write to (%(default)s)")
    parser.add_argument(
        "--parallel", choices=WAYS, help="over the ranks of torchrun, on the CPU: tensor or data parallelism"
    )
    parser.add_argument(
        "--steps", type=count(1, 31), help=f"of training ({defaults.steps}, with --parallel {parallel.STEPS})"
    )
    parser.add_argument("--seed", type=count(0, 63), default=defaults.seed, help="of weights and draws (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print the verdict alone")
    given = parser.parse_args(argv)
    if given.parallel:
        return _parallel(parser, given, defaults)
    given.steps = given.steps or defaults.steps
    missing = gpu.why_not() if given.device == "cuda" else None
    if missing is not None:
        parser.error(f"--device: {missing}")
    reason = _reason_against(given.out)
    if reason is not None:
        print(f"rl-kernels demo: --out: cannot write to {given.out}: {reason}", file=sys.stderr)
        return 2
    if given.device == "cuda":
        settings = gpu_settings.Settings(steps=given.steps, seed=given.seed)
        try:
            verdict = gpu.run(settings, gpu_settings.ModelSizes(), torch.device("cuda"), given.out, given.quiet)
        except BackendUnavailable as error:
            parser.error(f"--device: {' '.join(str(error).split())}")
    else:
        with _one_thread():
            verdict = run(Settings(steps=given.steps, seed=given.seed), given.out, given.quiet)
    return 0 if verdict.passed else 1


def _parallel(parser: Parser, given: Namespace, defaults: Settings) -> int:
    if given.device == "cuda":
        parser.error("--parallel: expected --device cpu; it shows bits, not speed")
    missing = parallel.why_not(given.parallel)
    if missing is not None:
        parser.error(f"--parallel: {missing}")
    settings = replace(defaults, steps=given.steps or parallel.STEPS, seed=given.seed)
    with _one_thread():
        return 0 if parallel.run(settings, given.parallel, given.quiet) else 1


def run(settings: Settings, out: Path, quiet: bool) -> Verdict:
    """Train, compare, print, and write ``curves.png`` and ``run.json`` into ``out``."""
    start = time.perf_counter()
    console = Console(quiet=quiet)
    with record_dispatch() as choices:
        trainer = Trainer(settings, watched=WATCHED)
        parameters = sum(weight.numel() for weight in trainer.policy.parameters())
        console.print(
            f"GRPO from random weights: {parameters:,} parameters, bytes as tokens, {settings.prompts} prompts x "
            f"{settings.samples_per_prompt} samples a step.\n4192= asks for 1249, the digits in ascending order.",
            highlight=False,
        )
        caption = report.caption(settings.watch_every)
        with report.TrainingView(console, settings.steps, caption=caption) as view:
            history = trainer.run(view)
        prompts, rollout = trainer.sample(settings.prompts)
        comparisons = [
            case
            for numerics in (OURS_FP32, *WATCHED)
            for case in compare(trainer.policy, rollout, numerics, settings.temperature)
        ]
    verdict = judged(history, comparisons)
    seconds = time.perf_counter() - start
    plot.draw(history, out / "curves.png")
    record.write(
        out / "run.json",
        settings=settings,
        model=trainer.policy.config,
        history=history,
        comparisons=comparisons,
        choices=choices,
        verdict=verdict,
        seconds=seconds,
    )
    pairs = list(zip(prompts, rollout.answers, strict=True))[:: len(prompts) // SHOWN]
    report.show_answers(console, [(*pair, task.reward(*pair)) for pair in pairs])
    report.show_comparison(console, comparisons)
    files = [str(out / "curves.png"), str(out / "run.json")]
    report.show_verdict(Console(), verdict, files, seconds, Settings().steps)
    report.show_next(console)
    return verdict


def judged(history: Sequence[StepMetrics], comparisons: Sequence[Comparison]) -> Verdict:
    """Judge a run by its rewards, and by every comparison through the operators, in FP32 and in BF16."""
    gaps = [metrics.gap for metrics in history]
    gaps += [metrics.watched[OURS_BF16.name] for metrics in history if metrics.watched]
    gaps += [case.gap for case in comparisons if case.numerics in (OURS_FP32.name, OURS_BF16.name)]
    return judge([metrics.reward for metrics in history], gaps, Settings().steps)


def _reason_against(folder: Path) -> str | None:
    """Make the folder; return why it cannot be written to, if so: better now than after the training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK) else "permission denied"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: with products this small, threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
