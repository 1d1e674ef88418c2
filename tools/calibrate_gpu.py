"""Narrow the contract's accuracy rows for a GPU to twice what was measured: `python tools/calibrate_gpu.py REPORT ...`.

The reports are of `rl-kernels check --json --check-grad` on GPUs of one architecture, with every backend that runs
there. For each row they say how much of its fence the results need (`share`). The architecture's own row allows twice
the largest share, and at least half of the fence, because larger sizes need more: on an H200 FP32 products over 8,192
terms need a fifth of it, the checker's products nothing. A row that would become no narrower is left out. Prints the
rows; `--write` replaces those of this architecture in the contract.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibrate import FILE, written

from rl_kernels.core.command import Parser, table
from rl_kernels.core.contract import ROW_KEYS, Contract, contract, parse

MARGIN, LEAST = 2.0, 0.5
"""The share that a row of an architecture allows: this many times the measured one, but at least the second."""
HEADER = ("row", "all", "this one", "share", "results", "largest share at")


class Need(NamedTuple):
    """Largest share of one row that its results need, their number, and the result that needs most."""

    share: float
    results: int
    at: str


def needs(reports: Sequence[Mapping[str, Any]]) -> dict[str, Need]:
    """Return the largest share of each row over all reports, and the result in which it occurred."""
    result: dict[str, Need] = {}
    for check in (output for report in reports for output in _checks(report)):
        old = result.get(check["row"], Need(-1.0, 0, ""))
        share = math.inf if check["share"] is None else check["share"]
        worst = (share, f"{check['case_id']}: {check['output']}") if share > old.share else (old.share, old.at)
        result[check["row"]] = Need(worst[0], old.results + 1, worst[1])
    return result


def _checks(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for candidate in report["candidates"]:
        yield from (check for check in candidate["outputs"] if check["row"])


def rows(reports: Sequence[Mapping[str, Any]], general: Contract) -> list[dict[str, Any]]:
    """Return the rows of the architecture, in the order of the contract."""
    machines = "; ".join(dict.fromkeys(map(_measured_on, reports)))
    needs_by_row = needs(reports)
    narrowed = []
    for key, row in general.rows.items():
        need = needs_by_row.get(" / ".join(key))
        if need is None or row.bitwise:
            continue
        allowed = max(MARGIN * need.share, LEAST)
        if allowed >= 1:
            continue
        atol, rtol = (rounded_up(allowed * value) for value in (row.atol, row.rtol))
        # Both are rounded up, so a share just below 1 may give the row itself.
        if (atol, rtol) >= (row.atol, row.rtol):
            continue
        provenance = (
            f"{need.results} results need at most {need.share:.2g} of the row for all architectures "
            f"({need.at}); this row allows {'twice that' if allowed > LEAST else 'half of it'}. Measured on {machines}."
        )
        values = (*key, min(atol, row.atol), min(rtol, row.rtol), False, provenance)
        narrowed.append(dict(zip(ROW_KEYS, values, strict=False)))
    return narrowed


def rounded_up(value: float) -> float:
    """Return the number rounded up to one digit."""
    if not value:
        return 0.0
    digits = -math.floor(math.log10(value))
    return round(math.ceil(round(value * 10.0**digits, 6)) * 10.0**-digits, digits + 1)


def _measured_on(report: Mapping[str, Any]) -> str:
    known = report["environment"]
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "cuda", "triton"))
    return f"{known['device']}, {versions}, {report['date']}"


def arch_of(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the architecture of all reports; ``ValueError`` if there is not one."""
    archs = sorted({report["environment"]["arch_key"] for report in reports})
    if len(archs) != 1 or archs[0] not in contract().archs:
        raise ValueError(f"expected reports of one architecture of the contract, got {', '.join(archs)}")
    return archs[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows, and with ``--write`` update the contract; return the exit status."""
    parser = Parser("calibrate_gpu.py", __doc__ or "")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--write", action="store_true", help="put the rows into tolerance_contract.json")
    args = parser.parse_args(argv)
    try:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in args.reports]
        arch = arch_of(reports)
        narrowed, needs_by_row = rows(reports, contract()), needs(reports)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"expected reports of `rl-kernels check --json`: {error}")
    lines = []
    for row in narrowed:
        key = tuple(row[name] for name in ROW_KEYS[:4])
        base, need = contract().rows[key], needs_by_row[" / ".join(key)]
        numbers = (str(base), f"{row['atol']:g}/{row['rtol']:g}", f"{need.share:.2g}", str(need.results))
        lines.append((" ".join(key[1:]), *numbers, need.at))
    print(table(HEADER, lines))
    if args.write:
        document = json.loads(FILE.read_text(encoding="utf-8"))
        if document["arch_overrides"][arch] != narrowed:
            # Narrower values raise the second number of the version.
            major, minor = document["version"].split(".")
            document["version"] = f"{major}.{int(minor) + 1}"
        document["arch_overrides"][arch] = narrowed
        parse(document)
        measured = {key: row.measured for key, row in contract().rows.items() if row.measured}
        assert contract().calibration is not None
        FILE.write_text(written(document, measured, contract().calibration), encoding="utf-8")
        print(f"{FILE}: {len(narrowed)} rows of {arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
