"""The command ``rl-kernels demo``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from rl_kernels.core import BackendUnavailable
from rl_kernels.core.command import Parser, count, location, table
from rl_kernels.demo import parallel, plot, report
from rl_kernels.demo.measures import Gap, Verdict, judge
from rl_kernels.demo.report import Comparison, line
from rl_kernels.demo.task import CPU, GPU, Settings
from rl_kernels.demo.train import StepMetrics, Trainer
from rl_kernels.demo.ways import OURS, STOCK, Numerics
from rl_kernels.lab.bench.environment import environment

DESCRIPTION = """Train a small transformer with GRPO on the CPU, through the operators, and compare the log-probs of
rollout and training bit by bit. With --device cuda the model is a Llama of 104 million parameters on a GPU, trained a
second time in stock PyTorch beside it. With --parallel, under torchrun, it trains over ranks and again in one process,
and compares the weights. Exit status 1 if one bit differs, or if the reward has not clearly risen in the default number
of steps or more; a shorter run only shows it."""
WATCHED = (Numerics(STOCK, "BF16"), Numerics(STOCK, "FP32"), Numerics(OURS, "BF16"))
"""Measured beside the training of the small policy in FP32."""
ALONE, SHOWN = 16, 8
"""Sequences that are decoded alone at the end, and sampled answers that are printed, spread over a rollout."""


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 if it showed what it is for, 1 if not, 2 for unusable arguments."""
    parser = Parser("rl-kernels demo", DESCRIPTION)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (%(default)s)")
    parser.add_argument("--out", type=location, default="rl-kernels-demo", help="folder to write to (%(default)s)")
    over_ranks = "over the ranks of torchrun, on the CPU: tensor or data parallelism"
    parser.add_argument("--parallel", choices=tuple(parallel.NAMES), help=over_ranks)
    steps = f"of training ({CPU.steps}, on a GPU {GPU.steps}, with --parallel {parallel.STEPS})"
    parser.add_argument("--steps", type=count(1, 31), help=steps)
    parser.add_argument("--seed", type=count(0, 63), default=CPU.seed, help="of weights and draws (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print the verdict alone")
    given = parser.parse_args(argv)
    if given.parallel and given.device == "cuda":
        parser.error("--parallel: expected --device cpu; it shows bits, not speed")
    if given.parallel and (missing := parallel.why_not(given.parallel)):
        parser.error(f"--parallel: {missing}")
    if given.device == "cuda" and (missing := why_no_gpu()):
        parser.error(f"--device: {missing}")
    if not given.parallel and (reason := _reason_against(given.out)):
        parser.error(f"--out: cannot write to {given.out}: {reason}")
    settings = replace(GPU if given.device == "cuda" else CPU, seed=given.seed)
    settings = replace(settings, steps=given.steps or (parallel.STEPS if given.parallel else settings.steps))
    threads = torch.get_num_threads()
    # With products this small, threads of a CPU wait for each other longer than they work.
    torch.set_num_threads(threads if settings.llama else 1)
    try:
        if given.parallel:
            return 0 if parallel.run(settings, given.parallel, given.quiet) else 1
        return 0 if run(settings, given.device, given.out, given.quiet).passed else 1
    except BackendUnavailable as error:
        parser.error(f"--device: {' '.join(str(error).split())}")
    finally:
        torch.set_num_threads(threads)


def why_no_gpu() -> str | None:
    """Say what is missing here, and how to get it, or return None."""
    if find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers"
    if not torch.cuda.is_available():
        return "this PyTorch sees no GPU: install a build of it for yours, or leave the option out"
    return None


def _reason_against(folder: Path) -> str | None:
    """Make the folder; return why it cannot be written to, if so: better now than after the training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK) else "permission denied"


def run(settings: Settings, device: str, out: Path, quiet: bool) -> Verdict:
    """Train, compare, print, and write ``curves.png`` and ``run.json`` into ``out``.

    A Llama is trained twice, by ours and in stock PyTorch; the small policy once, and compared further at the end.
    """
    start, console, loud = time.perf_counter(), Console(quiet=quiet), Console()
    histories, cases = dict[str, Sequence[StepMetrics]](), list[Comparison]()
    backends, parameters = dict[str, dict[str, str]](), 0
    for way in (OURS, STOCK) if settings.llama else (OURS,):
        trainer = Trainer(settings, way, device, watched=[Numerics(way, "FP32")] if settings.llama else WATCHED)
        parameters = sum(weight.numel() for weight in trainer.model.parameters())
        batch = f"{settings.prompts} prompts x {settings.samples_per_prompt} samples a step"
        line(console, f"GRPO, {way.name}: {parameters:,} parameters, random weights at first, {batch}.")
        line(console, "4192= asks for 1249, the digits in ascending order.\n")
        histories[way.name] = report.train(trainer, console)
        answers = [(*pair, f"{reward:.2f}") for *pair, reward in trainer.answers[:: -(-len(trainer.answers) // SHOWN)]]
        line(console, f"{table(('prompt', 'answer', 'reward'), answers)}\n")
        backends |= trainer.backends
        cases += [] if settings.llama else compared(trainer)
    needed = (GPU if settings.llama else CPU).steps
    verdict = judged(histories[OURS.name], cases, needed)
    where = environment(torch.device(device), ("rl-kernels", "transformers"))
    recorded, files = report.Recorded(histories, parameters, where), (out / "curves.png", out / "run.json")
    plot.draw(recorded, files[0])
    more = {"settings": asdict(settings), "backends": backends, "verdict": asdict(verdict)}
    final = [{"numerics": each.name, "sequences": size, "gap": asdict(gap)} for each, size, gap in cases]
    report.write(files[1], recorded, **more, comparison=final)
    if settings.llama:
        line(console, f"{table(('the same run twice', *histories, report.QUOTIENT), report.side_by_side(histories))}\n")
    else:
        report.show_comparison(console, cases)
    report.show_verdict(loud, verdict, needed)
    line(loud, f"{files[0]}, {files[1]} written; {time.perf_counter() - start:.0f} s")
    line(console, report.NEXT)
    return verdict


def compared(trainer: Trainer) -> list[Comparison]:
    """Sample once more, and decode the tokens again in all numerics: all sequences together, and some alone."""
    (batch,) = trainer.sample()
    size = len(batch.answers)
    both = (size, None), (1, range(0, size, -(-size // ALONE)))
    numerics = trainer.own, *trainer.watched[::-1]
    return [Comparison(each, many, trainer.compare(each, batch, rows)) for each in numerics for many, rows in both]


def judged(ours: Sequence[StepMetrics], cases: Sequence[Comparison], needed: int) -> Verdict:
    """Judge a run by its rewards, and by every comparison through the operators, in FP32 and in BF16."""
    gaps: list[Gap] = [*ours, *(each.gap for each in cases if each.numerics.way is OURS)]
    gaps += [gap for metrics in ours for name, gap in metrics.watched.items() if name.startswith(OURS.name)]
    return judge([metrics.reward for metrics in ours], gaps, needed)
