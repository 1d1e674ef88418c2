"""The tables of whole models, and of calls by PyTorch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import extent, of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

Results = Mapping[str, Any]
NAMES = {
    "Llama": "A Llama",
    "Qwen3Moe": "A Qwen3-MoE with {experts} experts, {chosen} of them chosen,",
    "GptOss": "A gpt-oss with {experts} experts, {chosen} of them chosen, its attention eager in the stock model,",
    "Qwen3_5": "A Qwen3.5, three of four layers Gated DeltaNet, flash-linear-attention in the stock model,",
    "Qwen3_5Moe": "A Qwen3.5-MoE with {experts} experts, {chosen} of them chosen, three of four layers Gated DeltaNet, "
    "flash-linear-attention in the stock model,",
}
"""Families of `model_step.py`."""


def steps(document: Results) -> str:
    """Return the table of `model_step.py`: milliseconds, and their share of the stock model's; or nothing."""
    if not document["ms"]:
        return ""
    ways = list(dict.fromkeys(way for ms in document["ms"].values() for way in ms))
    rows = [["ms", *ways]]
    for label, ms in document["ms"].items():
        cells = [f"{digits(ms[way])} ({ms[way] / ms[ways[0]]:.2f})" if way in ms else "" for way in ways]
        rows.append([label, *cells])
    peaks: dict[str, dict[str, float]] = {}
    for name, mib in document.get("memory", {}).items():
        label, _, way = name.partition(", ")
        peaks.setdefault(label, {})[way] = mib
    for label, mib_of in peaks.items():
        cells = [f"{mib_of[way]:,.0f} ({mib_of[way] / mib_of[ways[0]]:.2f})" if way in mib_of else "" for way in ways]
        rows.append([f"MiB beside weights and gradients, {label}", *cells])
    return f"{_sizes(document['settings'])}, without its head:\n\n{as_table(rows)}\n\n{ran_on(document['environment'])}"


def bits(document: Results) -> str:
    """Return the table of logits, log-probabilities and gradients that differ from prompts alone."""
    settings, ways = document["settings"], document["bits"]
    kinds = {"logits": ("logits", "of_logits"), "log-probabilities": ("logps", "of_logps")}
    if next(iter(ways["stock"]["prompts"].values())).get("of_tokens"):
        kinds["tokens with other experts"] = ("experts", "of_tokens")
    rows = [["that differ", *(f"{way}: {kind}" for way in ways for kind in kinds)]]
    for label in ways["invariant"]["prompts"]:
        by_way = [ways[way]["prompts"].get(label) for way in ways]
        # A stock hybrid refuses packed rows without FLA.
        cells = (
            [of(entry[name], entry[whole]) if entry else "refused" for name, whole in kinds.values()]
            for entry in by_way
        )
        rows.append([label, *(cell for way in cells for cell in way)])
        rows[-1] += map(extent, ways["stock"]["prompts"].get(label, {}).get("moves", {}).values())
    moves = next(iter(ways["stock"]["prompts"].values())).get("moves", {})
    rows[0] += (f"stock: log-probs with {kind} differ by, mean and largest" for kind in moves)
    counted = {way: entry["gradients"] for way, entry in ways.items() if entry["gradients"]}
    gradients = ", ".join(f"{way} {of(*counts.values())}" for way, counts in counted.items())
    prompts = f"{settings['prompts']} prompts of up to {settings['longest']} tokens, each compared with itself alone"
    note = f"- gradients of the prompts packed that differ from those padded: {gradients}"
    return f"{_sizes(settings)}; {prompts}:\n\n{as_table(rows)}\n\n{note}\n{ran_on(document['environment'])}"


def _sizes(settings: Results) -> str:
    widths = f"{settings['layers']} layers, hidden {settings['hidden']}, {settings['heads']} heads"
    kind = NAMES[settings.get("family", "Llama")].format(**settings)
    return f"{kind} of {widths}, {settings['kv_heads']} of keys, {settings['dtype']}"


def on_cpu(document: Results) -> str:
    """Return the table of `cpu_model.py`: milliseconds, stock and under ``invariant``, and their ratio."""
    settings, timed, machine = document["settings"], document["ms"], document["environment"]
    rows = [["ms", *(cell for dtype in timed for cell in (f"stock {dtype}", "`invariant`", "ratio"))]]
    for call in next(iter(timed.values())):
        pairs = [(ms[call]["stock"], ms[call]["invariant"]) for ms in timed.values()]
        cells = (cell for stock, own in pairs for cell in (digits(stock), digits(own), f"{own / stock:.2f}"))
        rows.append([call, *cells])
    sizes = f"{settings['layers']} layers, hidden {settings['hidden_size']}, vocabulary {settings['vocab_size']}"
    return f"A Llama of {sizes}:\n\n{as_table(rows)}\n\n{ran_on(machine)}, {machine['threads']} threads"


def products(document: Results) -> str:
    """Return the table of matrix products called by PyTorch's names."""
    return _calls(document, "products")


def attention(document: Results) -> str:
    """Return the table of attention called by PyTorch's names."""
    return _calls(document, "attention")


def _calls(document: Results, part: str) -> str:
    """Return a table of `client_calls.py`: time, and the bits of a row or sequence that change in a batch."""
    calls = document["calls"].get(part)
    if calls is None:
        return ""
    ways = list(next(iter(calls.values())))
    worked = all(way["error"] is not None for results in calls.values() for way in results.values())
    columns = ("us", "differ", "error") if worked else ("us", "differ")
    rows = [["", *(f"{way}, {column}" for column in columns for way in ways)]]
    for label, results in calls.items():
        rows.append([label, *(_cell(way, column) for column in columns for way in results.values())])
    return f"{as_table(rows)}\n\n{ran_on(document['environment'])}"


def _cell(way: Results, column: str) -> str:
    if column == "us":
        return digits(way["us"])
    return of(*way["differing"]) if column == "differ" else f"{way['error']:.1e}"
