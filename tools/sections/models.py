"""The tables of whole models, and of calls by PyTorch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sections.text import of, ran_on

from rl_kernels.lab.bench.report import as_table, digits

Found = Mapping[str, Any]


def steps(found: Found) -> str:
    """Return the table of `model_step.py`: milliseconds, and beside them their share of the stock model's."""
    ways = list(dict.fromkeys(way for each in found["ms"].values() for way in each))
    rows = [["ms", *ways]]
    for label, each in found["ms"].items():
        cells = [f"{digits(each[way])} ({each[way] / each[ways[0]]:.2f})" if way in each else "" for way in ways]
        rows.append([label, *cells])
    return f"{_sizes(found['settings'])}, without its head:\n\n{as_table(rows)}\n\n{ran_on(found['environment'])}"


def bits(found: Found) -> str:
    """Return the table of how many logits, log-probabilities and gradients differ from those of prompts alone."""
    given, ways = found["settings"], found["bits"]
    rows = [["that differ", *(f"{way}: {what}" for way in ways for what in ("logits", "log-probabilities"))]]
    for label in ways["stock"]["prompts"]:
        each = [ways[way]["prompts"][label] for way in ways]
        counts = [(found[what], found[f"of_{what}"]) for found in each for what in ("logits", "logps")]
        rows.append([label, *(of(*count) for count in counts)])
    gradients = ", ".join(f"{way} {of(*each['gradients'].values())}" for way, each in ways.items())
    prompts = f"{given['prompts']} prompts of up to {given['longest']} tokens, each compared with itself alone"
    return (
        f"{_sizes(given)}; {prompts}:\n\n{as_table(rows)}\n\n"
        f"- gradients of the prompts packed that differ from those padded: {gradients}\n{ran_on(found['environment'])}"
    )


def _sizes(settings: Found) -> str:
    widths = f"{settings['layers']} layers, hidden {settings['hidden']}, {settings['heads']} heads"
    return f"A Llama of {widths}, {settings['kv_heads']} of keys, {settings['dtype']}"


def on_cpu(found: Found) -> str:
    """Return the table of `cpu_model.py`: milliseconds, stock and under ``invariant``, and their ratio."""
    given, timed, where = found["settings"], found["ms"], found["environment"]
    rows = [["ms", *(cell for dtype in timed for cell in (f"stock {dtype}", "`invariant`", "ratio"))]]
    for call in next(iter(timed.values())):
        pairs = [(ms[call]["stock"], ms[call]["invariant"]) for ms in timed.values()]
        cells = (cell for stock, own in pairs for cell in (digits(stock), digits(own), f"{own / stock:.2f}"))
        rows.append([call, *cells])
    sizes = f"{given['layers']} layers, hidden {given['hidden_size']}, vocabulary {given['vocab_size']}"
    return f"A Llama of {sizes}:\n\n{as_table(rows)}\n\n{ran_on(where)}, {where['threads']} threads"


def products(found: Found) -> str:
    """Return the table of matrix products called by PyTorch's names."""
    return _calls(found, "products")


def attention(found: Found) -> str:
    """Return the table of attention called by PyTorch's names."""
    return _calls(found, "attention")


def _calls(found: Found, part: str) -> str:
    """Return a table of `client_calls.py`: time, and what a batch changes of a row or sequence."""
    calls = found["calls"].get(part)
    if calls is None:
        return ""
    ways = list(next(iter(calls.values())))
    worked = all(way["error"] is not None for each in calls.values() for way in each.values())
    columns = ("us", "differ", "error") if worked else ("us", "differ")
    rows = [["", *(f"{way}, {column}" for column in columns for way in ways)]]
    for label, each in calls.items():
        rows.append([label, *(_cell(way, column) for column in columns for way in each.values())])
    return f"{as_table(rows)}\n\n{ran_on(found['environment'])}"


def _cell(way: Found, column: str) -> str:
    if column == "us":
        return digits(way["us"])
    return of(*way["differing"]) if column == "differ" else f"{way['error']:.1e}"
