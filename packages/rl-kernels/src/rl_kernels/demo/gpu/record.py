"""The JSON of a run of both twins: what it was made of, every step, the summaries and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rl_kernels.core import Choice
from rl_kernels.demo.gpu.settings import ModelSizes, Settings
from rl_kernels.demo.gpu.summary import Summary
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.record import backends, dump
from rl_kernels.demo.verdict import Verdict
from rl_kernels.lab.bench.environment import environment


def write(
    path: Path,
    *,
    settings: Settings,
    sizes: ModelSizes,
    parameters: int,
    device: torch.device,
    histories: Mapping[str, Sequence[StepMetrics]],
    summaries: Mapping[str, Summary],
    choices: Sequence[Choice],
    verdict: Verdict,
    seconds: float,
) -> None:
    """Write the record as strict JSON; ``choices`` are those of our twin's first step."""
    twins: dict[str, Any] = {
        name: {"summary": asdict(summaries[name]), "steps": [asdict(metrics) for metrics in history]}
        for name, history in histories.items()
    }
    record = {
        "settings": asdict(settings),
        "model": {**asdict(sizes), "parameters": parameters},
        "environment": environment(device, ("rl-kernels", "transformers")),
        "backends": backends(choices),
        "twins": twins,
        "verdict": verdict.record(),
        "seconds": seconds,
    }
    dump(path, record)
