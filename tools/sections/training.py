"""The tables of training steps and rollouts, beside plain PyTorch, TRL and vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sections.text import of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

Found = Mapping[str, Any]


def grpo(found: Found) -> str:
    """Return the table of `grpo_step.py`: a whole step, and what it was timed with."""
    given, timed = found["settings"], found["steps"]
    sizes = f"{given['layers']} layers, hidden {given['hidden']}, vocabulary {given['vocab']}, {given['dtype']}"
    batch = f"{given['prompts'] * given['samples']} sequences of {given['tokens']} tokens"
    labels = {"ms": "step, ms", "extra_mib": "peak extra memory, MiB"}
    labels["largest"] = f"sequences that fit in {given['limit_gib']:g} GiB"
    both = timed["eager"], timed["rl-kernels"]
    labels = {key: label for key, label in labels.items() if None not in (step[key] for step in both)}
    rows = [["", *(column for label in labels.values() for column in (label, "/ eager"))]]
    for way, step in timed.items():
        rows.append([way, *(cell for key in labels for cell in _share(step[key], timed["eager"][key]))])
    return f"A Llama of {sizes}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(found['environment'])}"


def _share(value: float | None, eager: float) -> tuple[str, str]:
    return ("", "") if value is None else (_number(value), f"{value / eager:.2f}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else digits(value)


def trl(found: Found) -> str:
    """Return the table of `trl_step.py`: a step of TRL, as it comes and on the operators."""
    given, ways = found["settings"], found["ways"]
    labels = {"rollout_ms": "rollout, ms", "update_ms": "update, ms", "extra_mib": "update, peak extra MiB"}
    labels["largest"] = f"sequences that fit in {given['limit_gib']:g} GiB"
    rows = [["", *ways]]
    for key, label in labels.items():
        values = [way[key] for way in ways.values()]
        if None not in values:
            rows.append([label, *map(_number, values)])
    counts = [way["differing"] for way in ways.values()]
    theirs = next(each["TRL"] for each in counts if "TRL" in each)
    ours = [of(*each["rl-kernels"]) for each in counts if "rl-kernels" in each]
    rows.append(["tokens that differ from the rollout", of(*theirs), *ours])
    sizes = f"A Llama of {given['layers']} layers, hidden {given['hidden']}, vocabulary {given['vocab']}"
    batch = f"{given['groups']} groups of {given['samples']}, {given['prompt']} + {given['tokens']} tokens"
    dtype = {"autocast": "weights in FP32 under BF16 autocast"}.get(given["dtype"], given["dtype"])
    return f"{sizes}, {dtype}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(found['environment'])}"


def trl_objectives(found: Found) -> str:
    """Return the table of `trl_objectives.py`: the largest differences from TRL's loss, by its type."""
    rows = [["`loss_type`", "cells", "FP64 loss", "FP64 gradient", "FP32 loss", "FP32 gradient"]]
    for name, each in found["types"].items():
        rows.append([f"`{name}`", str(each["cells"]), *(f"{value:.1e}" for value in (*each["fp64"], *each["fp32"]))])
    return as_table(rows)


def rollouts(found: Found) -> str:
    """Return the tables of `vllm_rollout.py`: log-probabilities that differ from those of training, and speed."""
    given, tables = found["settings"], []
    what = f"{given['model']}, {given['layers']} layers, vLLM's model runner {given['runner']}"
    if "bits" in found:
        trainings = list(dict.fromkeys(each["training"] for each in found["bits"]))
        counts = {(each["way"], each["training"]): of(each["differ"], each["tokens"]) for each in found["bits"]}
        rows = [["rollout by; differ from training", *trainings]]
        rows += [[way, *(counts[way, training] for training in trainings)] for way in given["ways"]]
        tables.append(as_table(rows))
    if "speed" in found:
        title = f"sequences; tokens a second (over stock), median and best of {given['rounds']} rounds"
        rows = [[title, *given["ways"]]]
        for number, ways in found["speed"].items():
            rows.append([number, *("; ".join(cell) for cell in zip(*_speeds(ways), strict=True))])
        tables.append(as_table(rows))
    return "\n\n".join((f"{what}:", *tables, ran_on(found["environment"])))


def _speeds(ways: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """Yield the medians of ways, and then their largest, each with its ratio to that of the stock way."""
    for of_rounds in (statistics.median, max):
        values = {way: of_rounds(each) for way, each in ways.items()}
        stock = values.get("stock", float("nan"))
        yield [f"{value:,.0f} ({value / stock:.2f})" for value in values.values()]
