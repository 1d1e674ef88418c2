"""The tables of matrix products and of the head: their errors, schedules, segments, time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from sections.text import ran_on

from rl_kernels.lab.bench.report import as_table, digits

Found = Mapping[str, Any]
HEAD = ("in turn, ms (/ product)", "sustained, ms (/ product)", "MiB")


def compiled(found: Found) -> str:
    """Return the table of Triton's kernels by operator and GPU: how many, and the most that one of them uses."""
    archs = list(dict.fromkeys(each["arch"] for each in found["records"]))
    rows = [["operator", *archs]]
    for name in dict.fromkeys(each["operator"] for each in found["records"]):
        own = {each["arch"]: each for each in found["records"] if each["operator"] == name}
        rows.append([name, *(_used(own[arch]) if arch in own else "" for arch in archs)])
    made_with = ", ".join(f"{name} {what}" for name, what in found["environment"].items())
    return f"{as_table(rows)}\n\n- compiled with {made_with}"


def _used(each: Found) -> str:
    shared = f"{each['shared'] / 1024:.0f} of {each['of'] >> 10}"
    return f"{each['kernels']}: {each['registers']}, {each['spills']}, {shared}"


def chains(found: Found) -> str:
    """Return the table of `chain_error.py`: errors of long sums against FP64, and what a more exact sum costs."""
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
    return f"{as_table(rows)}\n\n{''.join(timed)}{ran_on(found['environment'])}"


def schedules(found: Found) -> str:
    """Return the table of how good the chosen schedules of products are: beside cuBLAS, and beside the fastest one."""
    by_rows: dict[int, list[Mapping[str, float]]] = {}
    for each in found["products"]:
        by_rows.setdefault(each["sizes"][0], []).append(each["shares"])
    rows = [["rows", "products", *(f"chosen / {other}: median, most" for other in ("cuBLAS", "fastest"))]]
    for number, shares in sorted(by_rows.items()):
        pairs = [(each["chosen"], each["chosen"] / min(each.values())) for each in shares]
        cells = (f"{statistics.median(ratios):.3f}, {max(ratios):.3f}" for ratios in zip(*pairs, strict=True))
        rows.append([str(number), str(len(shares)), *cells])
    return f"{as_table(rows)}\n\n{ran_on(found['environment'])}"


def segments(found: Found) -> str:
    """Return the table of `segment_times.py`: products with segments beside cuBLAS and the plain product."""
    shapes: dict[str, Mapping[str, Mapping[str, float]]] = found["us"]
    rows = [["N x K", "", *(f"M = {m}" for m in next(iter(shapes.values())))]]
    for shape, each in shapes.items():
        ways = [way for way in next(iter(each.values())) if way not in ("cuBLAS", "plain")]
        pairs = [("plain", "cuBLAS"), *((way, "plain") for way in ways), *((way, "cuBLAS") for way in ways[-1:])]
        for place, (ours, other) in enumerate(pairs):
            ratios = (f"{times[ours] / times[other]:.2f}" for times in each.values())
            rows.append(["" if place else shape.replace("x", " x "), f"{ours} / {other}", *ratios])
    return f"{as_table(rows)}\n\n{ran_on(found['environment'])}"


def heads(found: Found) -> str:
    """Return the tables of `head_times.py`: time and memory of every form, by shape."""
    tables = []
    for shape, each in found["shapes"].items():
        rows = [[shape, *HEAD]]
        for name, (*times, mib) in each["ways"].items():
            pairs = zip(times, each["ways"]["gemm"], strict=False)
            cells = (f"{digits(ms)} ({ms / product:.2f})" for ms, product in pairs)
            rows.append([f"`{name}`" if name.startswith("linear_logp") else name, *cells, f"{mib:,.0f}"])
        tables.append(as_table(rows))
    differing = sum(each["differing"] for each in found["shapes"].values())
    told = f"- numbers of the gradients that differ between the forms: {differing}"
    return "\n\n".join([*tables, f"{told}\n{ran_on(found['environment'])}"])
