"""The tables of matrix products and of the head: their errors, schedules, segments, time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from sections.text import ran_on

from rl_kernels.lab.bench.report import as_table, digits

Results = Mapping[str, Any]
HEAD = ("in turn, ms (/ product)", "sustained, ms (/ product)", "MiB")


def compiled(document: Results) -> str:
    """Return the table of Triton's kernels by operator and GPU: their number, and the largest use of resources."""
    archs = list(dict.fromkeys(record["arch"] for record in document["records"]))
    rows = [["operator", *archs]]
    for name in dict.fromkeys(record["operator"] for record in document["records"]):
        own = {record["arch"]: record for record in document["records"] if record["operator"] == name}
        rows.append([name, *(_used(own[arch]) if arch in own else "" for arch in archs)])
    made_with = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    return f"{as_table(rows)}\n\n- compiled with {made_with}"


def _used(record: Results) -> str:
    shared = f"{record['shared'] / 1024:.0f} of {record['of'] >> 10}"
    return f"{record['kernels']}: {record['registers']}, {record['spills']}, {shared}"


def chains(document: Results) -> str:
    """Return the table of `chain_error.py`: errors of long sums against FP64, and the times of more exact sums."""
    ways = list(dict.fromkeys(way for entry in document["sums"] for way in entry["ways"]))
    rows = [["error (shrink) of a sum over", "terms", *ways]]
    for entry in document["sums"]:
        cells = [entry["ways"].get(way) for way in ways]
        shown = ("" if cell is None else f"{cell['error']:.1e} ({cell['shrink']:.1e})" for cell in cells)
        rows.append([entry["sum"], entry["signs"], *shown])
    timed = (
        f"- {entry['what']}: {', '.join(f'{way} {digits(ms)} ms' for way, ms in entry['ms'].items())}\n"
        for entry in document["times"]
    )
    return f"{as_table(rows)}\n\n{''.join(timed)}{ran_on(document['environment'])}"


def schedules(document: Results) -> str:
    """Return the table of the chosen schedules' times, relative to cuBLAS and to the fastest schedule."""
    by_rows: dict[int, list[Mapping[str, float]]] = {}
    for product in document["products"]:
        by_rows.setdefault(product["sizes"][0], []).append(product["shares"])
    rows = [["rows", "products", *(f"chosen / {other}: median, most" for other in ("cuBLAS", "fastest"))]]
    for number, shares in sorted(by_rows.items()):
        pairs = [(by_way["chosen"], by_way["chosen"] / min(by_way.values())) for by_way in shares]
        cells = (f"{statistics.median(ratios):.3f}, {max(ratios):.3f}" for ratios in zip(*pairs, strict=True))
        rows.append([str(number), str(len(shares)), *cells])
    return f"{as_table(rows)}\n\n{ran_on(document['environment'])}"


def segments(document: Results) -> str:
    """Return the table of `segment_times.py`: products with segments beside cuBLAS and the plain product."""
    shapes: dict[str, Mapping[str, Mapping[str, float]]] = document["us"]
    rows = [["N x K", "", *(f"M = {m}" for m in next(iter(shapes.values())))]]
    for shape, times_by_rows in shapes.items():
        ways = [way for way in next(iter(times_by_rows.values())) if way not in ("cuBLAS", "plain")]
        pairs = [("plain", "cuBLAS"), *((way, "plain") for way in ways), *((way, "cuBLAS") for way in ways[-1:])]
        for place, (ours, other) in enumerate(pairs):
            ratios = (f"{times[ours] / times[other]:.2f}" for times in times_by_rows.values())
            rows.append(["" if place else shape.replace("x", " x "), f"{ours} / {other}", *ratios])
    return f"{as_table(rows)}\n\n{ran_on(document['environment'])}"


def heads(document: Results) -> str:
    """Return the tables of `head_times.py`: time and memory of every form, by shape."""
    tables = []
    for shape, shape_results in document["shapes"].items():
        rows = [[shape, *HEAD]]
        for name, (*times, mib) in shape_results["ways"].items():
            pairs = zip(times, shape_results["ways"]["gemm"], strict=False)
            cells = (f"{digits(ms)} ({ms / product:.2f})" for ms, product in pairs)
            rows.append([f"`{name}`" if name.startswith("linear_logp") else name, *cells, f"{mib:,.0f}"])
        tables.append(as_table(rows))
    differing = sum(shape_results["differing"] for shape_results in document["shapes"].values())
    note = f"- numbers of the gradients that differ between the forms: {differing}"
    return "\n\n".join([*tables, f"{note}\n{ran_on(document['environment'])}"])
