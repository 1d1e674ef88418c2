"""The tables of an operator's benchmarks: a summary for its README, its page, the host's time, and calls in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sections.text import filled, picture, ran_on

from rl_kernels.lab.bench.record import Document, Measured, Record
from rl_kernels.lab.bench.report import RATIO, Rows, as_list, as_table, digits, facts, quotient, tables

LONGEST = 100
"""Rows of a table that a page shows; of a longer one it shows the geometric means alone."""
QUOTED = "H200"
"""The device whose figures are quoted."""


def readme_table(documents: Mapping[str, Document]) -> str:
    """Return the tables of a package's README, of the device whose figures are quoted and without our own backends."""
    parts = []
    for name, document in documents.items():
        records = [record for record in document.records if not record.note.startswith("rl-kernels, backend")]
        rows = summary(records)
        if QUOTED in document.environment["device"] and len(rows) > 1:
            parts.append(f"{title_of(name, document)}, {timing_order(records)}:\n\n{as_table(rows)}")
    return filled(parts)


def benchmark_page(documents: Mapping[str, Document], folder: str) -> str:
    """Return the tables of a package's page of benchmarks, a section for each file of results in the folder."""
    files = {f"{folder}/{name}.json": (name, document) for name, document in documents.items()}
    return filled([part for file, entry in files.items() for part in _section(file, *entry)])


def _section(file: str, name: str, document: Document) -> Iterator[str]:
    heading = title_of(name, document)
    yield f"## {heading}"
    rows = summary(document.records)
    if len(rows) > 1:
        yield as_table(rows)
    yield picture(file, f"Share of the floor, {heading}")
    for title, cells in tables(document):
        yield f"{title}:\n\n{as_table(cells)}" if len(cells) <= LONGEST else f"{title}: {len(cells) - 1} rows."
    yield as_list(document)


def timing_order(records: Sequence[Record]) -> str:
    """Return "timed in turn" or "timed one after the other": the way in which the compared times were measured."""
    compared = [measured for record in records for measured in record.passes.values() if measured.ratio is not None]
    in_turn = all(measured.timing.beside_ms is not None for measured in compared)
    return "timed in turn" if in_turn else "timed one after the other"


def title_of(name: str, document: Document) -> str:
    """Return the title of a file of results: its set of shapes, and the device."""
    return f"Shapes `{name.partition('-')[2]}`, {document.environment['device']}"


def summary(records: Sequence[Record]) -> Rows:
    """Return a row for each peer: our time by its in each pass, as geometric mean and range over the shapes."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for name, measured in record.passes.items():
            if not record.ours and measured.ratio:
                ratios.setdefault(record.name, {}).setdefault(name, []).append(measured.ratio)
    passes = list(dict.fromkeys(name for ratios_by_pass in ratios.values() for name in ratios_by_pass))
    rows = [
        (peer, str(max(map(len, ratios_by_pass.values()))), *(_spread(ratios_by_pass.get(name, [])) for name in passes))
        for peer, ratios_by_pass in ratios.items()
    ]
    return [(RATIO, "shapes", *passes), *rows]


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{quotient(statistics.geometric_mean(ratios))} ({quotient(min(ratios))} to {quotient(max(ratios))})"


def host(document: Document) -> str:
    """Return the table of host times of small calls: `rl-kernels bench --set host`."""
    timed = [record for record in document.records if record.passes]
    passes = list(dict.fromkeys(name for record in timed for name in record.passes))
    rows: Rows = [
        ("operator", "shape", "", *(f"{name}{suffix}" for name in passes for suffix in (", us", f", {RATIO}")))
    ]
    for record in timed:
        cells = (cell for name in passes for cell in _call(record.passes.get(name)))
        rows.append((record.operator, record.shape, record.name, *cells))
    return f"{as_table(rows)}\n\n- {next(facts(document))}"


def _call(measured: Measured | None) -> tuple[str, str]:
    return ("", "") if measured is None else (f"{measured.timing.call_us:.0f}", quotient(measured.call_ratio))


def call_paths(results: Mapping[str, Any]) -> str:
    """Return what runs between a call and its launches, and the arguments of public functions."""
    passes: dict[tuple[str, str], list[str]] = {}
    for record in results["records"]:
        cells = passes.setdefault((record["call"], record["backend"]), [])
        cells += [str(record["functions"]), str(record["frames"])]
    head = (
        "function",
        "backend",
        *(f"{step}: {what}" for step in ("forward", "backward") for what in ("run", "frames")),
    )
    counts = [
        (name, str(count), f"{named}{' and options' * more}") for name, count, named, more in results["arguments"]
    ]
    arguments = as_table([("function", "positional", "keywords"), *counts])
    return f"{as_table([head, *[(*key, *cells) for key, cells in passes.items()]])}\n\n{arguments}"


def in_turn(document: Mapping[str, Any]) -> str:
    """Return the table of calls that were timed in turn; its ratios are of times, also where the numbers are rates."""
    rows, ratios = document["rows"], document["ratios"]
    ways = list(dict.fromkeys(way for row in rows for way in row if way != "call"))
    table = [[document["what"], *ways, *(f"time of {one} / {other}" for one, other in ratios)]]
    for row in rows:
        pairs = [[row.get(way) for way in (pair[::-1] if document["rate"] else pair)] for pair in ratios]
        quotients = ("" if None in pair else f"{pair[0] / pair[1]:.2f}" for pair in pairs)
        table.append([row["call"], *(digits(row[way]) if way in row else "" for way in ways), *quotients])
    return f"{as_table(table)}\n\n{ran_on(document['environment'])}"
