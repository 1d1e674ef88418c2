"""The table of the logs of `experiment.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from sections.text import of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

ENDS = 20
"""Steps over which a reward is averaged at the start and at the end of a run."""
HEADINGS = (
    *("model", "sampler", "updates old", "loss", "runs of steps", "reward, first and last steps", "tokens that differ"),
    *("KL, same weights", "outside 0.9 to 1.1", "clipped at once", "largest, nats", "other experts"),
    *("KL in the update", "largest gradient", "seconds a step"),
)


class Log(NamedTuple):
    """The settings and the environment of a run, and its steps."""

    first: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]


def read(folder: Path) -> list[Log]:
    """Return the logs of a folder that have a step."""
    lines = [list(map(json.loads, file.read_text(encoding="utf-8").splitlines())) for file in folder.glob("*.jsonl")]
    return [Log(first, steps) for first, *steps in lines if steps]


def section(logs: Sequence[Log]) -> str:
    """Return a row for each way to train, over its seeds; ``ValueError`` if other settings differ in a row."""
    groups: dict[tuple[Any, ...], list[Log]] = {}
    for log in logs:
        groups.setdefault(tuple(log.first["settings"][name] for name in ("model", "arm", "stale", "loss")), []).append(
            log
        )
    for way, same in groups.items():
        if any({**log.first["settings"], "seed": 0} != {**same[0].first["settings"], "seed": 0} for log in same):
            raise ValueError(f"logs of {', '.join(map(str, way))}: expected settings that differ in the seed alone")
    rows = [HEADINGS, *(_row(way, groups[way]) for way in sorted(groups))]
    machines = dict.fromkeys(ran_on(log.first["environment"]) for log in logs)
    return "\n\n".join((as_table(rows), "\n".join(machines)))


def _row(way: tuple[Any, ...], logs: Sequence[Log]) -> tuple[str, ...]:
    steps = [step for log in logs for step in log.steps]
    tokens = sum(step["sampler"]["tokens"] for step in steps)
    first, last = (
        fmean(step["reward"] for log in logs for step in log.steps[ends]) for ends in (slice(ENDS), slice(-ENDS, None))
    )
    rerouted = [step["sampler"]["rerouted"] for step in steps]
    return (
        *map(str, way),
        f"{len(logs)} of {min(len(log.steps) for log in logs)}",
        f"{first:.3f}, {last:.3f}",
        of(sum(step["sampler"]["differ"] for step in steps), tokens),
        _number(fmean(step["sampler"]["k3"] for step in steps)),
        *(_share(sum(step["sampler"][name] for step in steps), tokens) for name in ("outside", "clipped")),
        _number(max(step["sampler"]["largest"] for step in steps)),
        "" if None in rerouted else _share(sum(rerouted), tokens),
        _number(fmean(step["update"]["k3"] for step in steps)),
        _number(max(step["grad_norm"] for step in steps)),
        digits(median(step["seconds"] for step in steps)),
    )


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(some: int, every: int) -> str:
    return f"{some / every:.3%}" if some else "0"
