"""The JSON of a run of both twins: what it was made of, every step, the summaries and the verdict; to be read again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl_kernels.core import Choice
from rl_kernels.demo.gpu.settings import ModelSizes, Settings
from rl_kernels.demo.gpu.summary import Summary
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.measures import Gap
from rl_kernels.demo.record import backends, dump
from rl_kernels.demo.verdict import Verdict
from rl_kernels.lab.bench.environment import environment


@dataclass(frozen=True)
class Recorded:
    """A run that was recorded."""

    histories: Mapping[str, Sequence[StepMetrics]]
    summaries: Mapping[str, Summary]
    parameters: int
    environment: Mapping[str, str]


def read(path: Path) -> Recorded:
    """Return what ``write`` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    twins = found["twins"].items()
    return Recorded(
        {name: [_step(step) for step in twin["steps"]] for name, twin in twins},
        {name: Summary(**twin["summary"]) for name, twin in twins},
        found["model"]["parameters"],
        found["environment"],
    )


def _step(found: dict[str, Any]) -> StepMetrics:
    fp32 = found.get("fp32")
    return StepMetrics(**{**found, "fp32": None if fp32 is None else Gap(**fp32)})


def write(
    path: Path,
    *,
    settings: Settings,
    sizes: ModelSizes,
    parameters: int,
    device: torch.device,
    histories: Mapping[str, Sequence[StepMetrics]],
    summaries: Mapping[str, Summary],
    choices: Mapping[str, Sequence[Choice]],
    verdict: Verdict,
    seconds: float,
) -> None:
    """Write the record as strict JSON; ``choices`` are those of our twin, by dtype."""
    twins: dict[str, Any] = {
        name: {"summary": asdict(summaries[name]), "steps": [asdict(metrics) for metrics in history]}
        for name, history in histories.items()
    }
    record = {
        "settings": asdict(settings),
        "model": {**asdict(sizes), "parameters": parameters},
        "environment": environment(device, ("rl-kernels", "transformers")),
        "backends": {dtype: backends(made) for dtype, made in choices.items()},
        "twins": twins,
        "verdict": verdict.record(),
        "seconds": seconds,
    }
    dump(path, record)
