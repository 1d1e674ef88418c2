"""What `bench_tables.py` makes of the benchmarks of an operator: a summary for its README, and its page of tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from tool_tables import filled

from rl_kernels.lab.bench.record import Document, Record
from rl_kernels.lab.bench.report import RATIO, Rows, as_list, as_table, quotient, tables

LONGEST = 100
"""Rows of a table that a page shows; of a longer one it shows the geometric means alone."""
QUOTED = "H200"
"""The device whose figures are quoted."""


def readme_table(found: Mapping[str, Document]) -> str:
    """Return the tables of a package's README, of the device whose figures are quoted and without our own backends."""
    parts = []
    for name, document in found.items():
        others = [each for each in document.records if not each.note.startswith("rl-kernels, backend")]
        rows = summary(others)
        if QUOTED in document.environment["device"] and len(rows) > 1:
            parts.append(f"{title_of(name, document)}, {taken(others)}:\n\n{as_table(rows)}")
    return filled(parts)


def benchmark_page(found: Mapping[str, Document], picture: Mapping[str, str]) -> str:
    """Return the tables of a package's page of benchmarks, a section for each file of results, with its picture."""
    return filled([part for name, document in found.items() for part in _section(name, document, picture[name])])


def _section(name: str, document: Document, picture: str) -> Iterator[str]:
    heading = title_of(name, document)
    yield f"## {heading}"
    rows = summary(document.records)
    if len(rows) > 1:
        yield as_table(rows)
    yield f"![Share of the floor, {heading}]({picture})"
    for title, cells in tables(document):
        yield f"{title}:\n\n{as_table(cells)}" if len(cells) <= LONGEST else f"{title}: {len(cells) - 1} rows."
    yield as_list(document)


def taken(records: Sequence[Record]) -> str:
    """Return how the times that ratios compare were taken."""
    compared = [each for record in records for each in record.passes.values() if each.ratio is not None]
    in_turn = all(each.timing.beside_ms is not None for each in compared)
    return "timed in turn" if in_turn else "timed one after the other"


def title_of(name: str, document: Document) -> str:
    """Return what a file of results is called: its set of shapes, and the device."""
    return f"Shapes `{name.partition('-')[2]}`, {document.environment['device']}"


def summary(records: Sequence[Record]) -> Rows:
    """Return a row for each peer: our time by its in each pass, as geometric mean and range over the shapes."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for each in records:
        for name, measured in each.passes.items():
            if not each.ours and measured.ratio:
                ratios.setdefault(each.name, {}).setdefault(name, []).append(measured.ratio)
    passes = list(dict.fromkeys(name for found in ratios.values() for name in found))
    rows = [
        (peer, str(max(map(len, found.values()))), *(_spread(found.get(name, [])) for name in passes))
        for peer, found in ratios.items()
    ]
    return [(RATIO, "shapes", *passes), *rows]


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{quotient(statistics.geometric_mean(ratios))} ({quotient(min(ratios))} to {quotient(max(ratios))})"
