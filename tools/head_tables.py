"""The tables and the picture of what `head_times.py` measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tool_tables import filled, ran_on

from rl_kernels.demo.panels import BLUE, RED, tidy
from rl_kernels.lab.bench.plot import save
from rl_kernels.lab.bench.report import as_table, digits

OURS, PRODUCT = "linear_logp", "gemm"
HEADER = ("in turn, ms (/ product)", "sustained, ms (/ product)", "MiB")
GIB = 1024


def heads(files: Iterable[Path], pictures: Mapping[str, str]) -> str:
    """Return the tables of time and memory, each with its picture: name of a file -> address in the page."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        tables = [_table(shape, each["ways"]) for shape, each in found["shapes"].items()]
        differing = sum(each["differing"] for each in found["shapes"].values())
        parts.append(
            "\n\n".join(tables) + f"\n\n- numbers of the gradients that differ between the forms: {differing}\n"
            f"{ran_on(found['environment'])}\n\n![Time over memory]({pictures[file.stem]})"
        )
    return filled(parts)


def _table(shape: str, ways: Mapping[str, Any]) -> str:
    rows = [[shape, *HEADER]]
    for name, (*times, mib) in ways.items():
        cells = [f"{digits(ms)} ({ms / ways[PRODUCT][place]:.2f})" for place, ms in enumerate(times)]
        rows.append([f"`{name}`" if name.startswith(OURS) else name, *cells, f"{mib:,.0f}"])
    return as_table(rows)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture of time over memory, a panel for each shape, in the format that the file's name says."""
    shapes = document["shapes"]
    figure = Figure(figsize=(14, 8), layout="constrained")
    for place, (shape, each) in enumerate(shapes.items(), 1):
        _panel(figure.add_subplot(-(-len(shapes) // 2), 2, place), shape, each["ways"])
    save(figure, path)


def _panel(axes: Axes, shape: str, ways: Mapping[str, tuple[float, float, float]]) -> None:
    plain = sorted((mib / GIB, ms) for name, (_, ms, mib) in ways.items() if _is_plain(name))
    axes.plot(*zip(*plain, strict=True), "o-", color=BLUE, label=f"{OURS}, saved_mib")
    for name, (_, ms, mib) in ways.items():
        # The product alone is no log-probability: a line below which no forward pass comes.
        if name == PRODUCT:
            axes.axhline(ms, color="grey", linestyle=":", label="product of the logits alone")
        elif not _is_plain(name) and not name.endswith("main_grad"):
            axes.plot(mib / GIB, ms, "s", color=BLUE if name.startswith(OURS) else RED)
            axes.annotate(name, (mib / GIB, ms), textcoords="offset points", xytext=(6, 3), fontsize=9)
    axes.set(title=shape, xlabel="memory beyond the inputs, GiB", ylabel="forward + backward, ms", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize=9)
    tidy(axes)


def _is_plain(name: str) -> bool:
    return name == OURS or name.startswith(f"{OURS}, saved_mib")
