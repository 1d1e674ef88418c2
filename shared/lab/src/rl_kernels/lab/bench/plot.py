"""The plot of a run: for each operator and shape, the share of the floor that each implementation reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_kernels.lab.bench.record import OURS, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#3a9a5b", "#d9822b", "#8e5bb5", "#c0392b", "#17a2b8", "#7f8c8d", "#b7950b", "#e377c2", "#34495e", "#8c564b")
BLUE = "#2a6fbb"
MARKERS = "Dsv^PX<>hp"
LINE, HEAD = 0.27, 1.3
"""Inches per shape, and inches for the title and axis of an operator."""


def draw(records: Sequence[Record], path: Path, environment: Mapping[str, str]) -> None:
    """Write shares of the floor, one row of axes for each operator, one column for each pass."""
    # matplotlib is optional, and used for nothing else.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    timed = [record for record in records if record.passes]
    operators = list(dict.fromkeys((record.operator, record.dtype) for record in timed))
    if not operators:
        return
    rows = {key: [record for record in timed if (record.operator, record.dtype) == key] for key in operators}
    passes = {key: list(dict.fromkeys(name for record in mine for name in record.passes)) for key, mine in rows.items()}
    styles = _styles(timed)
    heights = [HEAD + LINE * len(_shapes(mine)) for mine in rows.values()]
    width = max(map(len, passes.values()))
    figure = Figure(figsize=(3 + 4.2 * width, sum(heights) + 0.8), layout=ConstrainedLayoutEngine(hspace=0.05))
    grid = figure.subplots(len(operators), width, squeeze=False, gridspec_kw={"height_ratios": heights})
    for line, (key, mine) in zip(grid, rows.items(), strict=True):
        for i, axes in enumerate(line):
            if i < len(passes[key]):
                _axes(axes, f"{key[0]}, {key[1]}: {passes[key][i]}", mine, passes[key][i], styles, named=i == 0)
            else:
                axes.set_visible(False)
    handles = [grid[0][0].plot([], [], linestyle="", label=name, **style)[0] for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 6), frameon=False)
    caption = [
        environment.get("device", ""),
        *(f"{name} {environment[name]}" for name in ("torch", "triton") if name in environment),
    ]
    figure.supxlabel(", ".join(filter(None, caption)), fontsize="small", color="#555555")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture; the same picture gives the same bytes, so that it can be committed."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "rl-kernels"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        # A line for each named group, and none for each point of a curve.
        path.write_text(re.sub(r" *\n *(?! *<g id)", " ", path.read_text(encoding="utf-8")) + "\n", encoding="utf-8")


def _styles(records: Sequence[Record]) -> dict[str, dict[str, object]]:
    """Return color and marker of each implementation, the same in all axes; ours come first."""
    names = dict.fromkeys(record.name for record in sorted(records, key=lambda record: not record.ours))
    styles: dict[str, dict[str, object]] = {}
    for i, name in enumerate(names):
        ours = name.split(" ")[0] == OURS
        peer = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 6, "alpha": 0.85}
        styles[name] = {"color": BLUE, "marker": "o", "markersize": 9, "zorder": 3} if ours else peer
    return styles


def _shapes(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.shape for record in records))


def _axes(
    axes: Axes,
    title: str,
    records: Sequence[Record],
    name: str,
    styles: Mapping[str, Mapping[str, Any]],
    *,
    named: bool,
) -> None:
    shapes = _shapes(records)
    shares: list[float] = []
    for record in records:
        if name in record.passes:
            shares.append(100 * record.passes[name].share)
            axes.plot(shares[-1], shapes.index(record.shape), linestyle="", **styles[record.name])
    axes.set_yticks(range(len(shapes)), shapes if named else [""] * len(shapes))
    axes.set_ylim(len(shapes) - 0.5, -0.5)
    axes.set_xlim(-2, max(105.0, *(share * 1.05 for share in shares)) if shares else 105)
    axes.axvline(100, color="#999999", linewidth=1, linestyle="--")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlabel("share of the floor, %")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
