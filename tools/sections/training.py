"""The tables of training steps and rollouts, beside plain PyTorch, TRL and vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sections.text import extent, of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

Results = Mapping[str, Any]


def grpo(document: Results) -> str:
    """Return the table of `grpo_step.py`: a whole step, and what it was timed with."""
    settings, timed = document["settings"], document["steps"]
    widths = f"{settings['layers']} layers, hidden {settings['hidden']}, vocabulary {settings['vocab']}"
    batch = f"{settings['prompts'] * settings['samples']} sequences of {settings['tokens']} tokens"
    labels = {"ms": "step, ms", "extra_mib": "peak extra memory, MiB"}
    labels["largest"] = f"sequences that fit in {settings['limit_gib']:g} GiB"
    both = timed["eager"], timed["rl-kernels"]
    labels = {key: label for key, label in labels.items() if None not in (step[key] for step in both)}
    rows = [["", *(column for label in labels.values() for column in (label, "/ eager"))]]
    for way, step in timed.items():
        rows.append([way, *(cell for key in labels for cell in _share(step[key], timed["eager"][key]))])
    sizes = f"{widths}, {settings['dtype']}; {batch}"
    return f"A Llama of {sizes}:\n\n{as_table(rows)}\n\n{ran_on(document['environment'])}"


def _share(value: float | None, eager: float) -> tuple[str, str]:
    return ("", "") if value is None else (_number(value), f"{value / eager:.2f}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else digits(value)


def trl(document: Results) -> str:
    """Return the table of `trl_step.py`: a step of TRL, unchanged and on the operators."""
    settings, ways = document["settings"], document["ways"]
    labels = {"rollout_ms": "rollout, ms", "update_ms": "update, ms", "extra_mib": "update, peak extra MiB"}
    labels["largest"] = f"sequences that fit in {settings['limit_gib']:g} GiB"
    rows = [["", *ways]]
    for key, label in labels.items():
        values = [way[key] for way in ways.values()]
        if None not in values:
            rows.append([label, *map(_number, values)])
    counts = [way["differing"] for way in ways.values()]
    theirs = next(counts_of_way["TRL"] for counts_of_way in counts if "TRL" in counts_of_way)
    ours = [of(*counts_of_way["rl-kernels"]) for counts_of_way in counts if "rl-kernels" in counts_of_way]
    rows.append(["tokens that differ from the rollout", of(*theirs), *ours])
    sizes = f"A Llama of {settings['layers']} layers, hidden {settings['hidden']}, vocabulary {settings['vocab']}"
    batch = f"{settings['groups']} groups of {settings['samples']}, {settings['prompt']} + {settings['tokens']} tokens"
    dtype = {"autocast": "weights in FP32 under BF16 autocast"}.get(settings["dtype"], settings["dtype"])
    return f"{sizes}, {dtype}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(document['environment'])}"


def mixture(document: Results) -> str:
    """Return the table of `trl_mixture.py`: a run of a mixture, and tokens whose update differs from their rollout."""
    settings, ways = document["settings"], document["ways"]
    rewards = (f"{way['reward'][0]:.2f}, {way['reward'][-1]:.2f}" for way in ways.values())
    rows = [["", *ways], ["reward, first and last steps", *rewards]]
    labels = {"differing": "tokens whose log-prob in the update differs", "rerouted": "tokens that go to other experts"}
    rows += [[label, *(of(way[name], way["tokens"]) for way in ways.values())] for name, label in labels.items()]
    for kind in next(iter(ways.values()))["moves"]:
        label = f"difference with {kind}, mean and largest"
        rows.append([label, *(extent(way["moves"][kind]) for way in ways.values())])
    rows.append(["largest ratio of update and rollout", *(f"{way['largest_ratio']:.4g}" for way in ways.values())])
    sizes = f"{settings['layers']} layers, hidden {settings['hidden']}, {settings['experts']} experts"
    batch = f"{settings['steps']} steps of {settings['groups']} groups of {settings['samples']}"
    parts = f"{settings['chosen']} of them chosen, from random weights; {batch}, in micro-batches"
    return f"A Qwen3-MoE of {sizes}, {parts}:\n\n{as_table(rows)}\n\n{ran_on(document['environment'])}"


PARTS = {
    "rollout": "sampling",
    "sync": "sync of weights",
    "scoring": "pass for old log-probs",
    "step": "whole step",
}
"""Timed parts of a step of TRL with vLLM, and their labels."""
WARMUP = 2
"""Turns that are not counted: compilation, and memory that is allocated once."""


def trl_with_vllm(document: Results) -> str:
    """Return the table of `trl_vllm_step.py`: medians of a step's parts, memory, and tokens that differ."""
    settings, ways = document["settings"], document["ways"]
    rows = [["", *ways]]
    for part, label in PARTS.items():
        medians = [1e3 * statistics.median(way["seconds"][part][WARMUP:]) for way in ways.values()]
        shares = [f"{digits(ms)} ({ms / medians[0]:.2f})" if medians[0] else digits(ms) for ms in medians]
        rows.append([f"{label}, ms", *(shares if part == "step" else map(digits, medians))])
    if all(way["peak_mib"] for way in ways.values()):
        rows.append(["peak memory, MiB", *(f"{way['peak_mib']:,.0f}" for way in ways.values())])
    rows.append(["vLLM's model runner", *(str(way["runner"]) for way in ways.values())])
    rows.append(["steps", *(str(len(way["seconds"]["step"])) for way in ways.values())])
    rows.append(["tokens that differ", *(of(way["differ"], way["tokens"]) for way in ways.values())])
    sizes = f"A Llama of {settings['layers']} layers, hidden {settings['hidden']}, vocabulary {settings['vocab']}"
    batch = f"{settings['groups']} groups of {settings['samples']}, {settings['prompt']} + {settings['tokens']} tokens"
    return f"{sizes}, {settings['dtype']}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(document['environment'])}"


def trl_objectives(document: Results) -> str:
    """Return the table of `trl_objectives.py`: the largest differences from TRL's loss, by its type."""
    rows = [["`loss_type`", "cells", "FP64 loss", "FP64 gradient", "FP32 loss", "FP32 gradient"]]
    for name, entry in document["types"].items():
        rows.append([f"`{name}`", str(entry["cells"]), *(f"{value:.1e}" for value in (*entry["fp64"], *entry["fp32"]))])
    return as_table(rows)


def samplers(document: Results) -> str:
    """Return the table of `sampler_bias.py`: log-probs over the vocabulary against those over kept tokens."""
    rows = [["sampler", "tokens", "mean ratio, vocabulary over kept", "outside 0.9 to 1.1", "kept tokens, median"]]
    for name, entry in document["samplers"].items():
        cells = (f"{entry['tokens']:,}", f"{entry['ratio']:.3f}", f"{entry['outside'] / entry['tokens']:.0%}")
        rows.append([name, *cells, f"{entry['kept']:,}"])
    settings = document["settings"]
    answers = f"{settings['answers']} answers each of up to {settings['tokens']} tokens"
    return f"{as_table(rows)}\n\n- {settings['prompts']} prompts, {answers}\n{ran_on(document['environment'])}"


def rollouts(document: Results) -> str:
    """Return the tables of `vllm_rollout.py`: log-probabilities that differ from training, and speed."""
    settings, tables = document["settings"], []
    title_line = f"{settings['model']}, {settings['layers']} layers, vLLM's model runner {settings['runner']}"
    if "bits" in document:
        trainings = list(dict.fromkeys(entry["training"] for entry in document["bits"]))
        counts = {(entry["way"], entry["training"]): of(entry["differ"], entry["tokens"]) for entry in document["bits"]}
        rows = [["rollout by; differ from training", *trainings]]
        rows += [[way, *(counts[way, training] for training in trainings)] for way in settings["ways"]]
        tables.append(as_table(rows))
    if "speed" in document:
        title = f"sequences; tokens a second (over stock), median and best of {settings['rounds']} rounds"
        rows = [[title, *settings["ways"]]]
        for number, ways in document["speed"].items():
            rows.append([number, *("; ".join(cell) for cell in zip(*_speeds(ways), strict=True))])
        tables.append(as_table(rows))
    return "\n\n".join((f"{title_line}:", *tables, ran_on(document["environment"])))


def _speeds(ways: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """Yield the median rates of the ways, then their largest rates, each with its ratio to the stock way."""
    for of_rounds in (statistics.median, max):
        values = {way: of_rounds(rates) for way, rates in ways.items()}
        stock = values.get("stock", float("nan"))
        yield [f"{value:,.0f} ({value / stock:.2f})" for value in values.values()]
