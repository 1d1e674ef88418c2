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
MISMATCH = (
    *("same weights: sampler and training", "tokens that differ", "KL", "outside 0.9 to 1.1", "clipped at once"),
    *("largest, nats", "other experts"),
)
TRAINING = (
    *("training", "runs of steps", "reward, first and last steps", "KL in the update", "largest gradient"),
    "seconds a step",
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
    tables = ([headings, *(row(way, groups[way]) for way in sorted(groups))] for headings, row in PARTS)
    machines = dict.fromkeys(ran_on(log.first["environment"]) for log in logs)
    return "\n\n".join((*map(as_table, tables), "\n".join(machines)))


def _mismatch(way: tuple[Any, ...], logs: Sequence[Log]) -> tuple[str, ...]:
    found = [step["sampler"] for log in logs for step in log.steps]
    tokens = sum(each["tokens"] for each in found)
    rerouted = [each["rerouted"] for each in found]
    return (
        _named(way),
        of(sum(each["differ"] for each in found), tokens),
        _number(fmean(each["k3"] for each in found)),
        *(_share(sum(each[name] for each in found), tokens) for name in ("outside", "clipped")),
        _number(max(each["largest"] for each in found)),
        "" if None in rerouted else _share(sum(rerouted), tokens),
    )


def _training(way: tuple[Any, ...], logs: Sequence[Log]) -> tuple[str, ...]:
    steps = [step for log in logs for step in log.steps]
    first, last = (
        fmean(step["reward"] for log in logs for step in log.steps[ends]) for ends in (slice(ENDS), slice(-ENDS, None))
    )
    return (
        _named(way),
        f"{len(logs)} of {min(len(log.steps) for log in logs)}",
        f"{first:.3f}, {last:.3f}",
        _number(fmean(step["update"]["k3"] for step in steps)),
        _number(max(step["grad_norm"] for step in steps)),
        digits(median(step["seconds"] for step in steps)),
    )


PARTS = ((MISMATCH, _mismatch), (TRAINING, _training))


def _named(way: tuple[Any, ...]) -> str:
    model, arm, stale, loss = way
    return f"{model}, `{arm}`, {stale} updates old, `{loss}`"


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(some: int, every: int) -> str:
    return f"{some / every:.3%}" if some else "0"
