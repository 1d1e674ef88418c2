"""The tables that `bench_tables.py` makes of what the tools beside it measured, one function a tool."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch import HEADINGS, rows

from rl_kernels.demo.gpu import record
from rl_kernels.demo.gpu.report import QUOTIENT, side_by_side
from rl_kernels.lab.bench.record import Measured, read
from rl_kernels.lab.bench.report import RATIO, as_table, digits, facts, quotient

NOTHING = "\nNo results are committed yet.\n\n"


def steps(files: Iterable[Path]) -> str:
    """Return the tables of whole steps, and what they were timed with."""
    return filled([_step(json.loads(file.read_text(encoding="utf-8"))) for file in files])


def _step(found: Mapping[str, Any]) -> str:
    given, timed, where = found["settings"], found["steps"], found["environment"]
    sizes = f"{given['layers']} layers, hidden {given['hidden']}, vocabulary {given['vocab']}, {given['dtype']}"
    batch = f"{given['prompts'] * given['samples']} sequences of {given['tokens']} tokens"
    labels = {"ms": "step, ms", "extra_mib": "peak extra memory, MiB"}
    labels["largest"] = f"sequences that fit in {given['limit_gib']:g} GiB"
    labels = {key: label for key, label in labels.items() if None not in (step[key] for step in _both(timed))}
    rows = [["", *(column for label in labels.values() for column in (label, "/ eager"))]]
    for way, step in timed.items():
        cells = (cell for key in labels for cell in _share(step[key], timed["eager"][key]))
        rows.append([way, *cells])
    return f"A Llama of {sizes}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(where)}"


def _both(timed: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return tuple(timed[name] for name in ("eager", "rl-kernels"))


def _share(value: float | None, eager: float) -> tuple[str, str]:
    if value is None:
        return "", ""
    return str(value) if isinstance(value, int) else digits(value), f"{value / eager:.2f}"


def compiled(files: Iterable[Path]) -> str:
    """Return the table of Triton's kernels by operator and GPU: how many, and the most that one of them uses."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        archs = list(dict.fromkeys(each["arch"] for each in found["records"]))
        rows = [["operator", *archs]]
        for name in dict.fromkeys(each["operator"] for each in found["records"]):
            own = {each["arch"]: each for each in found["records"] if each["operator"] == name}
            rows.append([name, *(_used(own[arch]) if arch in own else "" for arch in archs)])
        made_with = ", ".join(f"{name} {what}" for name, what in found["environment"].items())
        parts.append(f"{as_table(rows)}\n\n- compiled with {made_with}")
    return filled(parts)


def _used(each: Mapping[str, Any]) -> str:
    return (
        f"{each['kernels']}: {each['registers']}, {each['spills']}, {each['shared'] / 1024:.0f} of {each['of'] >> 10}"
    )


def chains(files: Iterable[Path]) -> str:
    """Return the tables of errors of long sums against FP64, and of what a more exact sum costs."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        ways = list(dict.fromkeys(way for each in found["sums"] for way in each["ways"]))
        rows = [["error (shrink) of a sum over", "terms", *ways]]
        for each in found["sums"]:
            cells = [each["ways"].get(way) for way in ways]
            shown = ("" if cell is None else f"{cell['error']:.1e} ({cell['shrink']:.1e})" for cell in cells)
            rows.append([each["sum"], each["signs"], *shown])
        timed = (
            f"- {each['what']}: {', '.join(f'{way} {digits(ms)} ms' for way, ms in each['ms'].items())}\n"
            for each in found["times"]
        )
        parts.append(f"{as_table(rows)}\n\n{''.join(timed)}{ran_on(found['environment'])}")
    return filled(parts)


def schedules(files: Iterable[Path]) -> str:
    """Return the tables of how good the chosen schedules of products are: beside cuBLAS, and beside the fastest one."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        by_rows: dict[int, list[Mapping[str, float]]] = {}
        for each in found["products"]:
            by_rows.setdefault(each["sizes"][0], []).append(each["shares"])
        rows = [["rows", "products", *(f"chosen / {other}: median, most" for other in ("cuBLAS", "fastest"))]]
        for number, shares in sorted(by_rows.items()):
            pairs = [(each["chosen"], each["chosen"] / min(each.values())) for each in shares]
            cells = (f"{statistics.median(ratios):.3f}, {max(ratios):.3f}" for ratios in zip(*pairs, strict=True))
            rows.append([str(number), str(len(shares)), *cells])
        parts.append(f"{as_table(rows)}\n\n{ran_on(found['environment'])}")
    return filled(parts)


def hosts(files: Iterable[Path]) -> str:
    """Return the tables of what the host takes for small calls."""
    parts = []
    for file in files:
        document = read(file)
        timed = [each for each in document.records if each.passes]
        passes = list(dict.fromkeys(name for each in timed for name in each.passes))
        rows = [["operator", "shape", "", *(f"{name}{what}" for name in passes for what in (", us", f", {RATIO}"))]]
        for each in timed:
            cells = [cell for name in passes for cell in _call(each.passes.get(name))]
            rows.append([each.operator, each.shape, each.name, *cells])
        parts.append(f"{as_table(rows)}\n\n- {next(facts(document))}")
    return filled(parts)


def _call(measured: Measured | None) -> tuple[str, str]:
    if measured is None:
        return "", ""
    return f"{measured.timing.call_us:.0f}", quotient(measured.call_ratio)


def ran_on(where: Mapping[str, str]) -> str:
    """Return the line under a table that says what it was measured on."""
    named = ("device", "date", "torch", "transformers", "vllm", "trl", "batch_invariant_ops", "triton")
    return f"- ran on {', '.join(f'{name} {where[name]}' for name in named if name in where)}"


def sizes_of(settings: Mapping[str, Any]) -> str:
    """Return what a model of `tools/model_step.py` is."""
    widths = f"{settings['layers']} layers, hidden {settings['hidden']}, {settings['heads']} heads"
    return f"A Llama of {widths}, {settings['kv_heads']} of keys, {settings['dtype']}"


def rollouts(files: Iterable[Path]) -> str:
    """Return the tables of rollouts in vLLM: log-probabilities that differ from those of training, and speed."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
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
                rows.append([number, *("; ".join(cell) for cell in zip(*speed_cells(ways), strict=True))])
            tables.append(as_table(rows))
        parts.append("\n\n".join((f"{what}:", *tables, ran_on(found["environment"]))))
    return filled(parts)


def speed_cells(ways: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """Yield the medians of ways, and then their largest, each with its ratio to that of the stock way."""
    for of_rounds in (statistics.median, max):
        values = {way: of_rounds(each) for way, each in ways.items()}
        stock = values.get("stock", float("nan"))
        yield [f"{value:,.0f} ({value / stock:.2f})" for value in values.values()]


def filled(parts: Sequence[str]) -> str:
    """Return what stands between markers."""
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else NOTHING


def cpu_models(files: Iterable[Path]) -> str:
    """Return the tables of a small model on the CPU: milliseconds, stock and under ``invariant``, and their ratio."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        given, timed = found["settings"], found["ms"]
        rows = [["ms", *(cell for dtype in timed for cell in (f"stock {dtype}", "`invariant`", "ratio"))]]
        for call in next(iter(timed.values())):
            pairs = [(ms[call]["stock"], ms[call]["invariant"]) for ms in timed.values()]
            cells = (cell for stock, own in pairs for cell in (digits(stock), digits(own), f"{own / stock:.2f}"))
            rows.append([call, *cells])
        sizes = f"{given['layers']} layers, hidden {given['hidden_size']}, vocabulary {given['vocab_size']}"
        threads = f"{found['environment']['threads']} threads"
        parts.append(f"A Llama of {sizes}:\n\n{as_table(rows)}\n\n{ran_on(found['environment'])}, {threads}")
    return filled(parts)


def model_steps(files: Iterable[Path]) -> str:
    """Return the tables of whole models: milliseconds, and beside them their share of the stock model's."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        given, timed, where = found["settings"], found["ms"], found["environment"]
        ways = list(dict.fromkeys(way for each in timed.values() for way in each))
        rows = [["ms", *ways]]
        for label, each in timed.items():
            cells = [f"{digits(each[way])} ({each[way] / each[ways[0]]:.2f})" if way in each else "" for way in ways]
            rows.append([label, *cells])
        parts.append(f"{sizes_of(given)}, without its head:\n\n{as_table(rows)}\n\n{ran_on(where)}")
    return filled(parts)


def model_bits(files: Iterable[Path]) -> str:
    """Return the tables of how many logits, log-probabilities and gradients differ from those of prompts alone."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        given, ways = found["settings"], found["bits"]
        rows = [["that differ", *(f"{way}: {what}" for way in ways for what in ("logits", "log-probabilities"))]]
        for label in ways["stock"]["prompts"]:
            each = [ways[way]["prompts"][label] for way in ways]
            counts = [(found[what], found[f"of_{what}"]) for found in each for what in ("logits", "logps")]
            rows.append([label, *(of(*count) for count in counts)])
        gradients = [(way, *each["gradients"].values()) for way, each in ways.items()]
        prompts = f"{given['prompts']} prompts of up to {given['longest']} tokens, each compared with itself alone"
        parts.append(
            f"{sizes_of(given)}; {prompts}:\n\n{as_table(rows)}\n\n- gradients of the prompts packed that differ from "
            f"those padded: {', '.join(f'{way} {of(*counts)}' for way, *counts in gradients)}\n"
            f"{ran_on(found['environment'])}"
        )
    return filled(parts)


def of(some: int, every: int) -> str:
    """Return how many of all, and their share where there is one."""
    share = f"{some / every:.0%}" if 200 * some >= every else "under 1%"
    return f"{some:,} of {every:,}" + (f" ({share})" if some else "")


def demos(files: Iterable[Path]) -> str:
    """Return the tables of both twins of the demo on a GPU, with their pictures."""
    parts = []
    for file in files:
        found = record.read(file)
        rows = [["", *found.summaries, QUOTIENT], *map(list, side_by_side(found.summaries))]
        picture = f"![Both twins, step by step]({file.stem}.svg)"
        parts.append(f"{as_table(rows)}\n\n{ran_on(found.environment)}\n\n{picture}")
    return filled(parts)


def mismatch(file: Path) -> str:
    """Return the table of what a mismatch between rollout and training does to a run."""
    if not file.exists():
        return NOTHING
    found = json.loads(file.read_text(encoding="utf-8"))
    given = found["settings"]
    batch = given["prompts"] * given["samples_per_prompt"]
    sizes = f"{found['seeds']} seeds, {given['steps']} steps of {batch} samples"
    return f"\n{sizes}:\n\n{as_table([HEADINGS, *rows(found['runs'])])}\n\n{ran_on(found['environment'])}\n\n"


def trl_steps(files: Iterable[Path]) -> str:
    """Return the tables of a step of TRL, as it comes and on the operators."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        given, ways, where = found["settings"], found["ways"], found["environment"]
        labels = {"rollout_ms": "rollout, ms", "update_ms": "update, ms", "extra_mib": "update, peak extra MiB"}
        labels["largest"] = f"sequences that fit in {given['limit_gib']:g} GiB"
        rows = [["", *ways]]
        for key, label in labels.items():
            values = [way[key] for way in ways.values()]
            if None not in values:
                rows.append([label, *(f"{x:,}" if isinstance(x, int) else digits(x) for x in values)])
        counts = [way["differing"] for way in ways.values()]
        theirs = next(each["TRL"] for each in counts if "TRL" in each)
        ours = [of(*each["rl-kernels"]) for each in counts if "rl-kernels" in each]
        rows.append(["tokens that differ from the rollout", of(*theirs), *ours])
        sizes = f"A Llama of {given['layers']} layers, hidden {given['hidden']}, vocabulary {given['vocab']}"
        batch = f"{given['groups']} groups of {given['samples']}, {given['prompt']} + {given['tokens']} tokens"
        dtype = {"autocast": "weights in FP32 under BF16 autocast"}.get(given["dtype"], given["dtype"])
        parts.append(f"{sizes}, {dtype}; {batch}:\n\n{as_table(rows)}\n\n{ran_on(where)}")
    return filled(parts)


def _cell(way: Mapping[str, Any], column: str) -> str:
    if column == "us":
        return digits(way["us"])
    return of(*way["differing"]) if column == "differ" else f"{way['error']:.1e}"


def client_calls(files: Iterable[Path], part: str) -> str:
    """Return the tables of calls by PyTorch's names: time, and what a batch changes of a row or sequence."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        calls = found["calls"].get(part)
        if calls is None:
            continue
        ways = list(next(iter(calls.values())))
        worked = all(way["error"] is not None for each in calls.values() for way in each.values())
        columns = ("us", "differ", "error") if worked else ("us", "differ")
        rows = [["", *(f"{way}, {column}" for column in columns for way in ways)]]
        for label, each in calls.items():
            cells = {column: [_cell(way, column) for way in each.values()] for column in columns}
            rows.append([label, *(cell for column in columns for cell in cells[column])])
        parts.append(f"{as_table(rows)}\n\n{ran_on(found['environment'])}")
    return filled(parts)
