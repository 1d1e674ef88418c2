"""Draws the pictures of results while the site is built: pages name them in comments, which tools/tables.py writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_kernels.lab.bench.plot import BLUE, COLORS, draw, save
from rl_kernels.lab.bench.record import read

NAMED = re.compile(r"<!-- picture of (\S+)\.json: (.+) -->")
RED, GIB = COLORS[3], 1024
HEAD, PRODUCT = "linear_logp", "gemm"


def named(markdown: str) -> Iterator[str]:
    """Yield the files of results of which a page has pictures."""
    return (f"{match[1]}.json" for match in NAMED.finditer(markdown))


def shown(markdown: str, folder: str) -> str:
    """Return a page with its pictures, which lie in this folder."""
    return NAMED.sub(lambda match: f"![{match[2]}]({folder}/{name(match[1])})", markdown)


def name(file: str) -> str:
    """Return the name of the picture of a file of results."""
    return f"{file.removesuffix('.json').replace('/', '-')}.svg"


def drawn(file: Path) -> str:
    """Return the picture of a file of results as SVG: shares of the floor, or of a head time over memory."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "picture.svg")
        if file.stem.endswith("-head"):
            draw_heads(json.loads(file.read_text(encoding="utf-8")), path)
        else:
            document = read(file)
            draw(document.records, path, document.environment)
        return path.read_text(encoding="utf-8")


def draw_heads(document: Mapping[str, Any], path: Path) -> None:
    """Write what `tools/head_times.py` measured, a panel for each shape."""
    shapes = document["shapes"]
    figure = Figure(figsize=(14, 8), layout="constrained")
    for place, (shape, each) in enumerate(shapes.items(), 1):
        _panel(figure.add_subplot(-(-len(shapes) // 2), 2, place), shape, each["ways"])
    save(figure, path)


def _panel(axes: Axes, shape: str, ways: Mapping[str, tuple[float, float, float]]) -> None:
    plain = sorted((mib / GIB, ms) for way, (_, ms, mib) in ways.items() if _is_plain(way))
    axes.plot(*zip(*plain, strict=True), "o-", color=BLUE, label=f"{HEAD}, saved_mib")
    for way, (_, ms, mib) in ways.items():
        # The product alone is no log-probability: a line below which no forward pass comes.
        if way == PRODUCT:
            axes.axhline(ms, color="gray", linestyle=":", label="product of the logits alone")
        elif not _is_plain(way) and not way.endswith("main_grad"):
            axes.plot(mib / GIB, ms, "s", color=BLUE if way.startswith(HEAD) else RED)
            axes.annotate(way, (mib / GIB, ms), textcoords="offset points", xytext=(6, 3), fontsize=9)
    axes.set(title=shape, xlabel="memory beyond the inputs, GiB", ylabel="forward + backward, ms", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _is_plain(way: str) -> bool:
    return way == HEAD or way.startswith(f"{HEAD}, saved_mib")
