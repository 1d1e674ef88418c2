"""Panels that both pictures share: tokens whose bits differ, the largest ratio, and KL, over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, SymmetricalLogLocator

BLUE, TEAL, GREEN, ORANGE, RED = "#2a6fbb", "#45c4b0", "#3a9a5b", "#d9822b", "#c0392b"


POWERS = 7
"""Powers of ten that an axis names, at most."""
SMALL = 0.02
"""Shares below it cannot be told from 0 on an axis from 0 to 100%."""


class Compared(Protocol):
    """What a step found of rollout and training: see ``measures.Gap``."""

    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def mismatches(self) -> int: ...  # noqa: D102
    @property
    def kl(self) -> float: ...  # noqa: D102
    @property
    def largest(self) -> float | None: ...  # noqa: D102


class Line(NamedTuple):
    """One way to compute: its name, colour and width, the steps that measured it, and what each found.

    The width is of a line that is 0 in every step: two of them, one on the other, are both seen if one is thinner.
    """

    label: str
    colour: str
    width: float
    steps: Sequence[int]
    found: Sequence[Compared]


def bits(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw the share of tokens whose log-probability differs in any bit; say of how many tokens it is 0.

    Where a share is so small that it would seem 0, the axis has powers of ten.
    """
    totals = [sum(each.mismatches for each in line.found) for line in lines]
    tokens = [sum(each.tokens for each in line.found) for line in lines]
    values = [[100 * each.mismatches / each.tokens for each in line.found] for line in lines]
    axes.set(title="Tokens whose log-prob differs in any bit", ylabel="% of tokens")
    if any(0 < total < SMALL * count for total, count in zip(totals, tokens, strict=True)):
        zero_and_powers(axes, lines, values)
        axes.set_ylim(top=200)
    else:
        _draw(axes, lines, values)
        axes.set_ylim(-3, 103)
    zero = [(line, count) for line, total, count in zip(lines, totals, tokens, strict=True) if not total]
    for place, (line, count) in enumerate(reversed(zero)):
        text, where = f"{line.label}: 0 of {count:,} tokens", (-4, 7 + 13 * place)
        coordinates = ("axes fraction", "data")
        said = axes.annotate(text, (1, 0), where, coordinates, "offset points", ha="right", color=line.colour)
        said.set(weight="bold", bbox={"color": "white", "alpha": 0.7, "pad": 1})


def ratio(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw the largest distance of a token's ratio from 1, of those lines whose steps say it."""
    known = [line for line in lines if line.found[0].largest is not None]
    zero_and_powers(axes, known, [[each.largest or 0.0 for each in line.found] for line in known])
    axes.set(title="Largest |ratio − 1|, before any update")


def kl(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw the KL divergence of training from rollout."""
    zero_and_powers(axes, lines, [[each.kl for each in line.found] for line in lines])
    axes.set(title="KL from rollout to training, same weights", ylabel="nats per token")


def _draw(axes: Axes, lines: Sequence[Line], values: Sequence[Sequence[float]]) -> None:
    for line, each in zip(lines, values, strict=True):
        if any(each):
            curve(axes, line.steps, each, line.colour, line.label)
        else:
            axes.plot(line.steps, each, color=line.colour, linewidth=line.width, label=line.label, clip_on=False)


def zero_and_powers(axes: Axes, lines: Sequence[Line], values: Sequence[Sequence[float]]) -> None:
    """Draw on a scale that is linear from 0 to the power of ten below all other values: 0 has a place of its own."""
    _draw(axes, lines, values)
    found = [value for each in values for value in each if value > 0]
    if found:
        least = 10.0 ** math.floor(math.log10(min(found)))
        axes.set_yscale("symlog", linthresh=least, linscale=1)
        axes.yaxis.set_minor_locator(NullLocator())
        locator = axes.yaxis.get_major_locator()
        assert isinstance(locator, SymmetricalLogLocator)
        locator.set_params(numticks=POWERS)
        axes.set_ylim(-0.15 * least, 3 * max(found))


def legend(figure: Figure, lines: Sequence[Line]) -> None:
    """Name the lines once for all panels that share them, above these."""
    handles = [Line2D([], [], color=line.colour, linewidth=min(line.width, 5), label=line.label) for line in lines]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(lines), frameon=False)


def over_steps(axes: Axes, last: int) -> None:
    """Let the steps lie along an axis, and little else around the curves."""
    axes.set_xlabel("step")
    axes.set_xlim(1, max(2, last))
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Leave a faint grid, and no frame above and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def curve(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str, label: str) -> None:
    """Draw each step thin, and the mean of the steps around it thick."""
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(values), color=colour, linewidth=2, label=label)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of the values around each."""
    reach = max(1, len(values) // 50)
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]
