"""The table and picture of `rl-kernels audit --rollout --json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sections.text import ran_on

from rl_kernels.lab.bench.report import as_table
from rl_kernels.models.rollouts import report
from rl_kernels.models.rollouts.counts import Mismatch


def section(document: Mapping[str, Any]) -> str:
    """Return the table of tokens that differ between rollout and training."""
    settings, (least, most) = document["settings"], document["prompt_tokens"]
    title = f"`{settings['model']}`, {settings['dtype']}: {document['samples']} prompts of {least} to {most} tokens, "
    title += (
        f"completions of up to {settings['tokens']}, temperature {settings['temperature']:g}, seed {settings['seed']}"
    )
    table = as_table(report.cells(_counts(document), settings))
    return f"{title}:\n\n{table}\n\n{ran_on(document['environment'])}"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture."""
    report.draw(_counts(document), document["settings"], path)


def _counts(document: Mapping[str, Any]) -> dict[str, dict[str, Mismatch]]:
    ways = document["counts"].items()
    return {way: {name: Mismatch(**each) for name, each in by_batch.items()} for way, by_batch in ways}
