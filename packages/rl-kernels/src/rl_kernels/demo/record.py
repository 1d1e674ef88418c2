"""The JSON of a run: what it was made of, every step, the comparison and the verdict."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rl_kernels.core import Choice
from rl_kernels.core.command import write_json
from rl_kernels.demo.compare import Comparison
from rl_kernels.demo.model import ModelConfig
from rl_kernels.demo.train import Settings, StepMetrics
from rl_kernels.demo.verdict import Verdict


def write(
    path: Path,
    *,
    settings: Settings,
    model: ModelConfig,
    history: Sequence[StepMetrics],
    comparisons: Sequence[Comparison],
    choices: Sequence[Choice],
    verdict: Verdict,
    seconds: float,
) -> None:
    """Write the record of a run as strict JSON."""
    record = {
        "settings": asdict(settings),
        "model": asdict(model),
        "environment": {
            "rl-kernels": version("rl-kernels"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
        },
        "backends": backends(choices),
        "steps": [asdict(metrics) for metrics in history],
        "comparison": [asdict(case) for case in comparisons],
        "verdict": verdict.record(),
        "seconds": seconds,
    }
    dump(path, record)


def backends(choices: Sequence[Choice]) -> dict[str, str]:
    """Return which backend ran each operator."""
    return {choice.operator: choice.backend for choice in choices}


def dump(path: Path, record: dict[str, Any]) -> None:
    """Write a record as strict JSON."""
    write_json(path, record)
