"""Generated cases: sizes around every tile edge, and all pairs of options.

An operator lists its sizes and the values of its options; the cases are made from these lists. By default they check
accuracy and gradients only: layouts, modes and global state are checked on the named cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, cycle
from typing import Any, Literal

from rl_kernels.core.testing.spec import Case

ROWS = (1, 2, 63, 64, 65, 127, 128, 129, 256, 2049)
"""Row counts around tile heights, and a few thousand."""
EDGES = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1000, 1023, 1024, 1025)
"""Sizes around tile widths, and exact multiples of them."""
CHECKED = ("accuracy", "gradients")
"""Relations that a generated case checks by default."""

Options = Mapping[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def anything(options: Options) -> bool:
    """Accept every combination: the default of ``pairs``."""
    return True


def pairs(axes: Mapping[str, Sequence[Any]], possible: Callable[[Options], bool] = anything) -> list[dict[str, Any]]:
    """Return combinations in which each value of an axis occurs with each value of every other axis at least once.

    Args:
        axes: option -> its values; ``None`` leaves the option out.
        possible: whether values may be combined; called with two options and with whole combinations.
    """
    missing = {
        ((first, i), (second, j))
        for first, second in combinations(axes, 2)
        for i, value in enumerate(axes[first])
        for j, other in enumerate(axes[second])
        if possible(_without_none({first: value, second: other}))
    }
    covering: list[dict[str, Any]] = []
    while missing:
        row = _row(axes, missing, possible)
        if row is None:
            # No whole combination can contain this pair.
            missing.remove(min(missing))
            continue
        missing -= set(combinations(row.items(), 2))
        covering.append(_without_none({name: axes[name][index] for name, index in row.items()}))
    return covering


def _row(
    axes: Mapping[str, Sequence[Any]], missing: set[Pair], possible: Callable[[Options], bool]
) -> dict[str, int] | None:
    """Start from the first missing pair; give every other option the value that covers most missing pairs."""

    def completed(chosen: dict[str, int]) -> dict[str, int] | None:
        name = next((name for name in axes if name not in chosen), None)
        if name is None:
            return {name: chosen[name] for name in axes}
        rows = [{**chosen, name: index} for index in range(len(axes[name]))]
        fitting = [row for row in rows if possible(_without_none({axis: axes[axis][at] for axis, at in row.items()}))]
        fitting.sort(key=lambda row: -_covered(axes, chosen, name, row[name], missing))
        return next(filter(None, map(completed, fitting)), None)

    return completed(dict(min(missing)))


def _covered(
    axes: Mapping[str, Sequence[Any]], chosen: Mapping[str, int], name: str, index: int, missing: set[Pair]
) -> int:
    order = list(axes)
    together = [
        sorted(((name, index), (other, at)), key=lambda entry: order.index(entry[0])) for other, at in chosen.items()
    ]
    return sum(tuple(pair) in missing for pair in together)


def _without_none(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def paired(
    name: str,
    sizes: Mapping[str, int],
    axes: Mapping[str, Sequence[Any]],
    possible: Callable[[Options], bool] = anything,
    **kind: Any,
) -> Iterator[Case]:
    """Yield a case for each combination of ``pairs``, all of the same numbers; an axis ``dtype`` sets its dtype."""
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
    """Yield cases with randomly drawn options, the same in every run; they combine three options and more."""
    source = random.Random(name)
    for number in range(count):
        options: dict[str, Any] = {}
        for axis, values in axes.items():
            extended = {**options, axis: source.choice(values)}
            options = extended if possible(_without_none(extended)) else options
        yield _case(f"{name}-{number}", sizes, _without_none(options), **kind)


def swept(
    name: str,
    sizes: Mapping[str, int],
    values: Sequence[int],
    options: Sequence[Options] = ({},),
    relations: tuple[str, ...] = CHECKED,
    suite: Literal["quick", "full"] = "quick",
    **kind: Any,
) -> Iterator[Case]:
    """Yield a case for each value of one size, cycling through ``options``."""
    for value, chosen in zip(values, cycle(options), strict=False):
        yield _case(f"{name}-{value}", {**sizes, name: value}, chosen, relations=relations, suite=suite, **kind)


def _case(name: str, sizes: Mapping[str, int], options: Options, **kind: Any) -> Case:
    arguments = {option: value for option, value in options.items() if option != "dtype"}
    return Case(name, sizes, arguments, dtype=options.get("dtype", ""), **{"relations": CHECKED, **kind})
