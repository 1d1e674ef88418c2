"""The whole demo on a GPU: train both twins, print them side by side, and write picture and record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from rl_kernels.core import Choice, record_dispatch
from rl_kernels.demo import report
from rl_kernels.demo.gpu import plot, record
from rl_kernels.demo.gpu.ours import OURS
from rl_kernels.demo.gpu.report import COLUMNS, STEPS_CAPTION, show_twins
from rl_kernels.demo.gpu.settings import ModelSizes, Settings
from rl_kernels.demo.gpu.stock import STOCK
from rl_kernels.demo.gpu.summary import summarised
from rl_kernels.demo.gpu.train import StepMetrics, Twin
from rl_kernels.demo.gpu.way import Way
from rl_kernels.demo.verdict import Verdict, judge

SHOWN = 8
"""Sampled answers that are printed."""


@dataclass(frozen=True)
class Trained:
    """A twin at its end: its steps, what they dispatched by dtype, and what the last one sampled."""

    parameters: int
    history: Sequence[StepMetrics]
    choices: Mapping[str, Sequence[Choice]]
    answers: Sequence[tuple[str, str, float]]


def why_not() -> str | None:
    """Say what is missing here, and how to get it, or return None."""
    if find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers"
    if not torch.cuda.is_available():
        return "this PyTorch sees no GPU: install a build of it for yours, or leave the option out"
    return None


def run(settings: Settings, sizes: ModelSizes, device: torch.device, out: Path, quiet: bool) -> Verdict:
    """Train both twins, print, and write ``curves.png`` and ``run.json`` into ``out``; tests do so on a CPU.

    Raises:
        BackendUnavailable: the operators cannot run on this GPU.
    """
    start = time.perf_counter()
    console = Console(quiet=quiet)
    twins = {way.name: train(settings, sizes, way, device, console) for way in (OURS, STOCK)}
    ours = twins[OURS.name]
    histories = {name: twin.history for name, twin in twins.items()}
    summaries = {name: summarised(history) for name, history in histories.items()}
    verdict = judged(ours.history)
    seconds = time.perf_counter() - start
    picture, document = out / "curves.png", out / "run.json"
    plot.draw(histories, summaries, ours.parameters, picture)
    record.write(
        document,
        settings=settings,
        sizes=sizes,
        parameters=ours.parameters,
        device=device,
        histories=histories,
        summaries=summaries,
        choices=ours.choices,
        verdict=verdict,
        seconds=seconds,
    )
    report.show_answers(console, ours.answers[:: -(-len(ours.answers) // SHOWN)])
    show_twins(console, summaries)
    where = "in all steps, in BF16 and FP32"
    report.show_verdict(Console(), verdict, [str(picture), str(document)], seconds, Settings().steps, where)
    report.show_next(console)
    return verdict


def judged(ours: Sequence[StepMetrics]) -> Verdict:
    """Judge a run by our twin alone: its rewards, and every comparison in BF16 and in FP32."""
    in_fp32 = [metrics.fp32 for metrics in ours if metrics.fp32 is not None]
    return judge([metrics.reward for metrics in ours], [*ours, *in_fp32], Settings().steps)


def train(settings: Settings, sizes: ModelSizes, way: Way, device: torch.device, console: Console) -> Trained:
    """Train one twin in its way, and show its steps.

    In BF16 only the first step's dispatch is recorded: where it is, no launch plan is kept from one call to the next.
    """
    twin = Twin(settings, sizes, way, device)
    parameters = sum(weight.numel() for weight in twin.model.parameters())
    console.print(
        f"GRPO on a Llama of {parameters:,} parameters, {settings.prompts} prompts x "
        f"{settings.samples_per_prompt} samples a step.",
        highlight=False,
    )
    with twin.taken(), report.TrainingView(console, settings.steps, COLUMNS, way.name, STEPS_CAPTION) as view:
        with record_dispatch() as choices:
            history = [twin.step(1)]
        view(history[0])
        for step in range(2, settings.steps + 1):
            history.append(twin.step(step))
            view(history[-1])
    return Trained(parameters, history, {"BF16": choices, "FP32": twin.fp32_choices}, twin.answers)
