"""Tables of a run: for a terminal, and as Markdown for the docs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from rl_kernels.lab.bench.record import Document, Measured, Record

Rows = list[tuple[str, ...]]

RATIO = "ours / theirs"
RATE, RATE_AND_TOKENS = "rate", "rate, G tokens/s"
"""Heads of the column of rates; the second one where the records have a number of tokens."""
COLUMNS = ("shape", "implementation", "ms", RATE, "floor", RATIO, "extra MiB", "call us", f"call, {RATIO}")
COUNTED = "launches, waits"
"""A column that appears only if they were counted."""


def text(document: Document) -> None:
    """Print the tables for a terminal."""
    for title, rows in tables(document):
        head, *body = rows
        table = Table(box=None, padding=(0, 2, 0, 0))
        for i, name in enumerate(head):
            table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
        for row in body:
            table.add_row(*row)
        # Print the full width: a pipe would cut the table off.
        width = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
        print(title)
        Console(width=width).print(table)
        print()
    for line in (*remarks(document.records), *facts(document)):
        print(line)


def markdown(document: Document) -> None:
    """Print the tables as Markdown."""
    print(as_markdown(document))


FORMATS: dict[str, Callable[[Document], None]] = {"text": text, "md": markdown}
"""The values of ``--format``."""


def as_markdown(document: Document) -> str:
    """Return the tables, the remarks, and the environment."""
    parts = [f"{title}\n\n{as_table(rows)}" for title, rows in tables(document)]
    return "\n\n".join([*parts, as_list(document)])


def as_list(document: Document) -> str:
    """Return remarks and facts as a Markdown list; ``<``, as in ``<locals>``, is escaped."""
    lines = (*remarks(document.records), *facts(document))
    return "\n".join(f"- {line}".replace("<", "\\<") for line in lines)


def as_table(rows: Rows) -> str:
    """Return rows as a Markdown table; the first row is the head."""
    head, *body = rows
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def tables(document: Document) -> Iterator[tuple[str, Rows]]:
    """Yield a title and a table for each operator, dtype and pass, then one of geometric means if there are groups."""
    for operator, dtype in dict.fromkeys(
        (record.operator, record.dtype) for record in document.records if record.shape
    ):
        mine = [record for record in document.records if (record.operator, record.dtype) == (operator, dtype)]
        timed = [record for record in mine if record.passes]
        passes = list(dict.fromkeys(name for record in timed for name in record.passes))
        for name in passes:
            pairs = [(record, record.passes[name]) for record in timed if name in record.passes]
            counted = any(measured.timing.launches is not None for _, measured in pairs)
            rows = [_row(record, measured, counted) for record, measured in pairs]
            head = [RATE_AND_TOKENS if column == RATE and mine[0].tokens else column for column in COLUMNS]
            yield f"{operator}, {dtype}, {name}", [(*head, COUNTED) if counted else (*head,), *rows]
        means = _means(timed, passes)
        if means:
            yield f"{operator}, {dtype}: geometric means of {RATIO}", means


def _row(record: Record, measured: Measured, counted: bool) -> tuple[str, ...]:
    timing = measured.timing
    cells = (
        *(record.shape, record.name, digits(timing.ms), _rate(measured, record.tokens)),
        f"{100 * measured.share:.0f} %",
        quotient(measured.ratio),
        "n/a" if timing.extra_mib is None else f"{timing.extra_mib:.0f}",
        f"{timing.call_us:.0f}",
        quotient(measured.call_ratio),
    )
    counts = ["-" if value is None else str(value) for value in (timing.launches, timing.waits)]
    return (*cells, ", ".join(counts)) if counted else cells


def _rate(measured: Measured, tokens: int) -> str:
    # A CPU's rates are best read in units a thousand times smaller.
    factor, unit = (1000, measured.unit.replace("T", "G", 1)) if measured.rate < 0.1 else (1, measured.unit)
    rate = f"{digits(factor * measured.rate)} {unit}"
    return f"{rate}, {digits(tokens / measured.timing.ms * 1e-6)}" if tokens else rate


def digits(value: float) -> str:
    """Return a number with three significant digits, and no exponent."""
    if value <= 0 or not math.isfinite(value):
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def quotient(ratio: float | None) -> str:
    """Return a ratio with two decimals, or three where it is small; an empty string for None."""
    return "" if ratio is None else f"{ratio:.{2 if ratio >= 0.1 else 3}f}"


def _means(records: Sequence[Record], passes: Sequence[str]) -> Rows:
    rows: Rows = []
    for group in dict.fromkeys(record.group for record in records if record.group):
        for name in dict.fromkeys(record.name for record in records if not record.ours):
            mine = [record for record in records if (record.group, record.name) == (group, name)]
            ratios = {
                key: [ratio for record in mine if key in record.passes and (ratio := record.passes[key].ratio)]
                for key in passes
            }
            cells = (f"{statistics.geometric_mean(r):.3f}" if r else "-" for r in ratios.values())
            if any(ratios.values()):
                rows.append((group, name, *cells))
    return [("shapes", "implementation", *passes), *rows] if rows else []


def remarks(records: Sequence[Record]) -> Iterator[str]:
    """Yield each wrong result, each skip with its reason, and each note on a peer once; then clocks and ratios."""
    for record in records:
        if record.ours and record.wrong:
            yield f"WRONG, no speed: {record.operator} {record.shape} {record.dtype} ({record.name}): {record.wrong}"
    reasons: dict[str, list[str]] = {}
    for record in records:
        for name, reason in record.skipped.items():
            subject = f"{record.operator}: {record.name}, {name}" if name else f"{record.operator}: {record.name}"
            reasons.setdefault(f"skipped: {subject}: {reason}", []).append(record.shape)
    for line, shapes in reasons.items():
        named = ", ".join(shapes) if len(shapes) < 4 else f"{len(shapes)} shapes"
        yield f"{line} ({named})" if shapes[0] else line
    for operator, name, note in dict.fromkeys((e.operator, e.name, e.note) for e in records if e.passes and e.note):
        yield f"{operator}: {name}: {note}"
    yield from _clocks(records)
    compared = [measured for record in records for measured in record.passes.values() if measured.ratio is not None]
    if compared:
        turns = sum(measured.timing.beside_ms is not None for measured in compared)
        yield f"{RATIO}: {turns} of {len(compared)} ratios are of samples in turn with ours"


def _clocks(records: Sequence[Record]) -> Iterator[str]:
    """Yield the clocks that took the times, with the places where the clock was not the usual one."""
    by_clock: dict[str, list[str]] = {}
    for record in records:
        for measured in record.passes.values():
            by_clock.setdefault(measured.timing.how, []).append(f"{record.operator} {record.name} {record.shape}")
    usual = max(by_clock, key=lambda clock: len(by_clock[clock]), default="")
    for clock, places in by_clock.items():
        few = [] if clock == usual else list(dict.fromkeys(places))
        yield f"clock: {clock}, {len(places)} times" + (f" ({', '.join(few)})" if few else "")


def facts(document: Document) -> Iterator[str]:
    """Yield the environment, and the measured ceilings of the device."""
    yield "ran on " + ", ".join(f"{name} {value}" for name, value in document.environment.items())
    for dtype, ceilings in document.ceilings.items():
        copied, product = digits(ceilings.bytes_per_s * 1e-12), digits(ceilings.flops_per_s * 1e-12)
        yield f"ceilings, {dtype}: {copied} TB/s (copy of {ceilings.copy}), {product} TFLOP/s ({ceilings.product})"
