"""The table and the picture of what `kept_logits.py` measured."""

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

OURS, COMPILED = "linear_logp", "compile"
GIB = 1024


def kept_logits(files: Iterable[Path], pictures: Mapping[str, str]) -> str:
    """Return the tables of time and memory, each with its picture: name of a file -> address in the page."""
    parts = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        shapes: dict[str, Any] = {name: each["ways"] for name, each in found["shapes"].items()}
        rows = [["", *(f"{shape}{what}" for shape in shapes for what in (", ms (/ compile)", ", MiB"))]]
        for way in dict.fromkeys(way for each in shapes.values() for way in each):
            cells = [cell for each in shapes.values() for cell in _cells(each, way)]
            rows.append([f"`{way}`" if way.startswith(OURS) else way, *cells])
        differing = sum(each["differing"] for each in found["shapes"].values())
        parts.append(
            f"{as_table(rows)}\n\n- numbers that `saved_mib` changes: {differing}\n{ran_on(found['environment'])}\n\n"
            f"![Time over memory]({pictures[file.stem]})"
        )
    return filled(parts)


def _cells(ways: Mapping[str, Any], name: str) -> tuple[str, str]:
    if name not in ways:
        return "", ""
    (ms, mib), compiled = ways[name], ways[COMPILED][0]
    return f"{digits(ms)} ({ms / compiled:.2f})", f"{mib:,.0f}"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture of time over memory, a panel for each shape, in the format that the file's name says."""
    shapes = document["shapes"]
    figure = Figure(figsize=(14, 8), layout="constrained")
    for place, (shape, each) in enumerate(shapes.items(), 1):
        _panel(figure.add_subplot(-(-len(shapes) // 2), 2, place), shape, each["ways"])
    save(figure, path)


def _panel(axes: Axes, shape: str, ways: Mapping[str, tuple[float, float]]) -> None:
    mine = sorted((mib / GIB, ms) for name, (ms, mib) in ways.items() if name.startswith(OURS))
    axes.plot(*zip(*mine, strict=True), "o-", color=BLUE, label=f"{OURS}, saved_mib")
    for name, (ms, mib) in ways.items():
        # The product alone is no log-probability: a line below which no forward pass comes.
        if name == "gemm":
            axes.axhline(ms, color="grey", linestyle=":", label="product of the logits alone")
        elif not name.startswith(OURS):
            axes.plot(mib / GIB, ms, "s", color=RED)
            axes.annotate(name, (mib / GIB, ms), textcoords="offset points", xytext=(6, 3), fontsize=9)
    axes.set(title=shape, xlabel="memory beyond the inputs, GiB", ylabel="forward + backward, ms", yscale="log")
    axes.legend(fontsize=9)
    tidy(axes)
