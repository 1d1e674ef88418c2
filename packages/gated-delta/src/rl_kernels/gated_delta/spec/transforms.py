"""Layouts of gated_delta_rule that must not change a bit, and garbage that must not reach a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Transform, Variant
from rl_kernels.gated_delta.spec.places import (
    BY_SEQUENCE,
    BY_TOKEN,
    LAYOUT,
    Tokens,
    dense,
    left_padded,
    packed,
    places_of,
    sequences_of,
)
from rl_kernels.lab.check.transforms import as_int32

Build = Callable[[list[Tokens], Callable[[int], Tokens]], Iterator[tuple[str, list[int | None], Inputs]]]
"""Takes the sequences of a call, and a source of unrelated ones; yields a label, the sequences, and the layout."""


def _variant(label: str, base: Inputs, chosen: Sequence[int | None], layout: Inputs, *, is_part: bool) -> Variant:
    """Return a variant whose sequence j is ``chosen[j]`` of the base call, or unrelated (None).

    With ``is_part`` it has only the first tokens of sequences, so that only the output can be compared.
    """
    call = {name: value for name, value in base.items() if name not in LAYOUT} | layout
    places, base_places = places_of(call), places_of(base)
    kept = [(j, i) for j, i in enumerate(chosen) if i is not None]

    def rows(place: tuple[int, slice], x: torch.Tensor, count: int | None = None) -> torch.Tensor:
        return x[place[0], place[1]][:count]

    def length(j: int) -> int:
        return places[j][1].stop - places[j][1].start

    def pick(name: str, result: torch.Tensor) -> torch.Tensor | None:
        if name in BY_SEQUENCE and not is_part:
            return torch.stack([result[i] for _, i in kept])
        if name == "out" or (name in BY_TOKEN and not is_part):
            return torch.cat([rows(base_places[i], result, length(j)) for j, i in kept])
        return None

    def find(name: str, result: torch.Tensor) -> torch.Tensor:
        if name in BY_SEQUENCE:
            return torch.stack([result[j] for j, _ in kept])
        return torch.cat([rows(places[j], result) for j, _ in kept])

    def lift(name: str, upstream: torch.Tensor) -> torch.Tensor:
        if name == "state":
            lifted = upstream.new_ones((len(chosen), *upstream.shape[1:]))
            for j, i in kept:
                lifted[j] = upstream[i]
            return lifted
        # Padding is never read.
        lifted = upstream.new_full((*call["q"].shape[:2], *upstream.shape[2:]), 1.0 if "start" not in call else torch.nan)
        for j, i in enumerate(chosen):
            rows(places[j], lifted).fill_(1.0)
            if i is not None:
                rows(places[j], lifted).copy_(rows(base_places[i], upstream, length(j)))
        return lifted

    return Variant(label, call, pick, find, lift)


def _transform(build: Build, *, is_part: bool = False) -> Transform:
    def variants(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
        sequences = sequences_of(call)
        if not sequences:
            return

        def unrelated(count: int) -> Tokens:
            first = sequences[0]
            q, k, v, g, beta = (draw.normal(count, *x.shape[1:]).to(x.dtype) for x in first.rows)
            state = None if first.state is None else draw.normal(*first.state.shape).to(first.state.dtype)
            return Tokens((q, k, v, -g.abs(), beta.abs()), state)

        for label, chosen, layout in build(sequences, unrelated):
            yield _variant(label, call, chosen, layout, is_part=is_part)

    return variants


def _alone(sequences: list[Tokens], unrelated: Callable[[int], Tokens]) -> Iterator[tuple[str, list[int | None], Inputs]]:
    for i in sorted({0, len(sequences) - 1}):
        yield f"sequence {i} alone", [i], dense([sequences[i]])


def _batch(sequences: list[Tokens], unrelated: Callable[[int], Tokens]) -> Iterator[tuple[str, list[int | None], Inputs]]:
    last = len(sequences) - 1
    for size, place in ((2, 1), (5, 2)):
        rows = [unrelated(sequences[last].count) for _ in range(size)]
        rows[place] = sequences[last]
        yield f"in a batch of {size}", [last if j == place else None for j in range(size)], dense(rows)


def _left(sequences: list[Tokens], unrelated: Callable[[int], Tokens]) -> Iterator[tuple[str, list[int | None], Inputs]]:
    for padding in (0, 1, 70):
        label = f"{padding} more tokens of padding"
        yield label, list(range(len(sequences))), left_padded(sequences, padding, torch.nan)


def _packed(sequences: list[Tokens], unrelated: Callable[[int], Tokens]) -> Iterator[tuple[str, list[int | None], Inputs]]:
    order = list(reversed(range(len(sequences))))
    yield "packed in reverse", order, packed([sequences[i] for i in order])
    chosen, parts = [], []
    for i, count in zip(order, (3, 0, 64, 17, 1), strict=False):
        chosen += [None, i]
        parts += [unrelated(count), sequences[i]]
    yield "packed among others", chosen, packed(parts)


def _first(sequences: list[Tokens], unrelated: Callable[[int], Tokens]) -> Iterator[tuple[str, list[int | None], Inputs]]:
    longest = max(range(len(sequences)), key=lambda i: sequences[i].count)
    count = sequences[longest].count
    for stop in sorted({1, count // 2, count - 1, 16, 64} & set(range(1, count))):
        yield f"the first {stop} tokens", [longest], dense([sequences[longest].first(stop)])


TRANSFORMS: dict[str, Transform] = {
    "alone": _transform(_alone),
    "batch": _transform(_batch),
    "left padding": _transform(_left),
    "packing": _transform(_packed),
    "first tokens": _transform(_first, is_part=True),
    "dtype of bounds": as_int32("cu_seqlens", "start"),
}
