"""Cases along dimensions: sizes around every tile, and options of which each meets each other.

An operator says which sizes it has and which values its options take; the cases are made from that. They are held to
accuracy and gradients, unless they say otherwise: the layouts and surroundings of a call belong to the named cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, cycle
from typing import Any, Literal

from rl_kernels.core.testing.spec import Case

ROWS = (1, 2, 63, 64, 65, 127, 128, 129, 256, 2049)
"""Numbers of rows on both sides of the heights of tiles, and a few thousand."""
EDGES = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1000, 1023, 1024, 1025)
"""Sizes on both sides of the widths of tiles, and their exact multiples."""
HELD = ("accuracy", "gradients")

Options = Mapping[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def anything(options: Options) -> bool:
    """Accept every combination: the default of ``pairs``."""
    return True


def pairs(axes: Mapping[str, Sequence[Any]], possible: Callable[[Options], bool] = anything) -> list[dict[str, Any]]:
    """Return combinations in which each value of each axis meets each value of every other at least once.

    Args:
        axes: option -> its values; ``None`` leaves the option out.
        possible: whether values may stand together; asked of two options and of all.
    """
    missing = {
        ((first, i), (second, j))
        for first, second in combinations(axes, 2)
        for i, one in enumerate(axes[first])
        for j, other in enumerate(axes[second])
        if possible(_given({first: one, second: other}))
    }
    found: list[dict[str, Any]] = []
    while missing:
        row = _row(axes, missing, possible)
        if row is None:
            # A pair that no whole combination can hold is given up.
            missing.remove(min(missing))
            continue
        missing -= set(combinations(row.items(), 2))
        found.append(_given({name: axes[name][index] for name, index in row.items()}))
    return found


def _row(
    axes: Mapping[str, Sequence[Any]], missing: set[Pair], possible: Callable[[Options], bool]
) -> dict[str, int] | None:
    """Start from the first missing pair; give every other option the value with which most pairs are met."""

    def completed(chosen: dict[str, int]) -> dict[str, int] | None:
        name = next((name for name in axes if name not in chosen), None)
        if name is None:
            return {name: chosen[name] for name in axes}
        rows = [{**chosen, name: index} for index in range(len(axes[name]))]
        fitting = [row for row in rows if possible(_given({axis: axes[axis][at] for axis, at in row.items()}))]
        fitting.sort(key=lambda row: -_met(axes, chosen, name, row[name], missing))
        return next(filter(None, map(completed, fitting)), None)

    return completed(dict(min(missing)))


def _met(
    axes: Mapping[str, Sequence[Any]], chosen: Mapping[str, int], name: str, index: int, missing: set[Pair]
) -> int:
    order = list(axes)
    together = [
        sorted(((name, index), (other, at)), key=lambda each: order.index(each[0])) for other, at in chosen.items()
    ]
    return sum(tuple(pair) in missing for pair in together)


def _given(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def paired(
    name: str,
    sizes: Mapping[str, int],
    axes: Mapping[str, Sequence[Any]],
    possible: Callable[[Options], bool] = anything,
    **kind: Any,
) -> Iterator[Case]:
    """Yield a case for each combination of ``pairs``, of the same numbers; an axis ``dtype`` is the case's own."""
    for number, options in enumerate(pairs(axes, possible)):
        yield _case(f"{name}-{number}", sizes, options, drawn_as=name, **kind)


def drawn(
    name: str,
    sizes: Mapping[str, int],
    axes: Mapping[str, Sequence[Any]],
    count: int,
    possible: Callable[[Options], bool] = anything,
    **kind: Any,
) -> Iterator[Case]:
    """Yield cases of values drawn at random, always the same ones: three options and more meet."""
    source = random.Random(name)
    for number in range(count):
        options: dict[str, Any] = {}
        for axis, values in axes.items():
            wanted = {**options, axis: source.choice(values)}
            options = wanted if possible(_given(wanted)) else options
        yield _case(f"{name}-{number}", sizes, _given(options), **kind)


def swept(
    name: str,
    sizes: Mapping[str, int],
    values: Sequence[int],
    options: Sequence[Options] = ({},),
    relations: tuple[str, ...] = HELD,
    suite: Literal["quick", "full"] = "quick",
    **kind: Any,
) -> Iterator[Case]:
    """Yield a case for each value of one size; ``options`` are taken in turn."""
    for value, given in zip(values, cycle(options), strict=False):
        yield _case(f"{name}-{value}", {**sizes, name: value}, given, relations=relations, suite=suite, **kind)


def _case(name: str, sizes: Mapping[str, int], options: Options, **kind: Any) -> Case:
    rest = {option: value for option, value in options.items() if option != "dtype"}
    return Case(name, sizes, rest, dtype=options.get("dtype", ""), **{"relations": HELD, **kind})
