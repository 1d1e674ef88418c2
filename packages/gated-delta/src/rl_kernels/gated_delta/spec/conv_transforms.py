"""Layouts of causal_conv1d that must not change a bit, and garbage that must not reach a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Variant
from rl_kernels.gated_delta.reference import spans

LAYOUT = frozenset({"x", "state", "cu_seqlens", "start"})
"""Arguments that a layout replaces."""
SUMS = ("gradient:weight", "gradient:bias")
OF_STATE = ("state", "gradient:state")


class Piece(NamedTuple):
    """Tokens of one sequence of the base call, or unrelated ones (None), and the state before them."""

    sequence: int | None
    tokens: slice
    x: torch.Tensor
    state: torch.Tensor | None = None


class Base:
    """A call and its sequences."""

    def __init__(self, call: Inputs, draw: Draw) -> None:
        self.call, self.draw = call, draw
        self.spans = list(spans(call["x"], call.get("cu_seqlens"), call.get("start")))
        self.lengths = [tokens.stop - tokens.start for _, tokens in self.spans]

    def piece(self, number: int, first: int = 0, stop: int | None = None) -> Piece:
        """Return tokens of a sequence, with the inputs before them as their state."""
        row, tokens = self.spans[number]
        x, stop = self.call["x"][row, tokens], self.lengths[number] if stop is None else stop
        state = self.call["state"][number] if "state" in self.call else None
        if first:
            before = x.new_zeros(3, x.shape[1]) if state is None else state
            state = torch.cat((before, x))[first : first + 3]
        return Piece(number, slice(first, stop), x[first:stop], state)

    def garbage(self, count: int, number: float | None = None) -> Piece:
        """Return an unrelated sequence of ``count`` tokens, random or filled with a number."""
        width = self.call["x"].shape[2]
        x = self.draw.normal(count, width, scale=3.0)
        return Piece(None, slice(0, count), x if number is None else x.fill_(number))

    def whole(self) -> list[Piece]:
        """Return all sequences."""
        return [self.piece(number) for number in range(len(self.spans))]

    def applies(self, name: str, piece: Piece) -> bool:
        """Say whether a piece has a result of the base call: most gradients and the last state need its last token."""
        assert piece.sequence is not None
        is_last = piece.tokens.stop == self.lengths[piece.sequence]
        if name == "gradient:state":
            return is_last and not piece.tokens.start
        return name == "out" or is_last


def packed(pieces: Sequence[Piece], like: torch.Tensor) -> Inputs:
    """Return the layout of packed sequences."""
    bounds = torch.tensor([0, *accumulate(len(piece.x) for piece in pieces)], device=like.device)
    return {
        "x": torch.cat([like.new_zeros(0, like.shape[2]), *(piece.x for piece in pieces)])[None],
        "cu_seqlens": bounds,
    }


def padded(pieces: Sequence[Piece], like: torch.Tensor, more: int = 0, number: float = 7.0) -> Inputs:
    """Return the layout of sequences in rows that end together, with ``more`` padding than is needed."""
    longest = max((len(piece.x) for piece in pieces), default=0) + more
    x, start = like.new_full((len(pieces), longest, like.shape[2]), number), []
    for row, piece in zip(x, pieces, strict=True):
        start.append(longest - len(piece.x))
        row[start[-1] :] = piece.x
    layout = {"x": x}
    return {**layout, "start": torch.tensor(start, device=like.device)} if any(start) else layout


def variant(label: str, base: Base, pieces: Sequence[Piece], layout: Inputs) -> Variant:
    """Return a call of pieces in a layout, and where their results are.

    The sums over all tokens are compared if all sequences are there, and numbers among the others are finite.
    """
    call = {name: value for name, value in base.call.items() if name not in LAYOUT} | layout
    if any(piece.state is not None for piece in pieces):
        none = call["x"].new_zeros(3, call["x"].shape[2])
        call["state"] = torch.stack([none if piece.state is None else piece.state for piece in pieces])
    places = list(spans(call["x"], call.get("cu_seqlens"), call.get("start")))
    related = [(number, piece) for number, piece in enumerate(pieces) if piece.sequence is not None]
    is_whole = (
        [piece.sequence for _, piece in related] == list(range(len(base.spans)))
        and all(base.applies("gradient:state", piece) for _, piece in related)
        and all(bool(piece.x.isfinite().all()) for piece in pieces if piece.sequence is None)
    )

    def pick(name: str, result: torch.Tensor) -> torch.Tensor | None:
        if name in SUMS:
            return result if is_whole else None
        rows = []
        for _, piece in related:
            if base.applies(name, piece):
                row, tokens = base.spans[piece.sequence or 0]
                rows.append(result[piece.sequence] if name in OF_STATE else result[row, tokens][piece.tokens].flatten())
        return torch.cat([row.flatten() for row in rows]) if rows else None

    def find(name: str, result: torch.Tensor) -> torch.Tensor:
        if name in SUMS:
            return result
        rows = []
        for number, piece in related:
            if base.applies(name, piece):
                row, tokens = places[number]
                rows.append(result[number] if name in OF_STATE else result[row, tokens])
        return torch.cat([row.flatten() for row in rows])

    def lift(name: str, upstream: torch.Tensor) -> torch.Tensor:
        if name == "state":
            lifted = upstream.new_zeros(len(pieces), *upstream.shape[1:])
            for number, piece in related:
                if base.applies(name, piece):
                    lifted[number] = upstream[piece.sequence]
            return lifted
        # Gradients of padding are not read.
        lifted = upstream.new_full(call["x"].shape, torch.nan)
        for row, tokens in places:
            lifted[row, tokens] = 0
        for number, piece in related:
            (row, tokens), (of_row, of_tokens) = places[number], base.spans[piece.sequence or 0]
            lifted[row, tokens] = upstream[of_row, of_tokens][piece.tokens]
        return lifted

    return Variant(label, call, pick, find, lift)


def alone(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Compute each sequence alone: dense, padded and packed."""
    base = Base(call, draw)
    for number in sorted({0, len(base.spans) // 2, len(base.spans) - 1} & set(range(len(base.spans)))):
        piece, like = [base.piece(number)], call["x"]
        yield variant(f"sequence {number} alone", base, piece, padded(piece, like))
        for more in (1, 64, 67):
            label = f"sequence {number} behind {more} of padding"
            yield variant(label, base, piece, padded(piece, like, more, torch.nan if more == 67 else 7.0))
        yield variant(f"sequence {number} packed alone", base, piece, packed(piece, like))


def together(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Compute all sequences in other layouts, and among others without gradient: the sums over tokens are the same."""
    base, like = Base(call, draw), call["x"]
    whole = base.whole()
    if not whole:
        return
    yield variant("packed", base, whole, packed(whole, like))
    yield variant("padded", base, whole, padded(whole, like))
    yield variant("padded more", base, whole, padded(whole, like, 70, torch.nan))
    yield variant("packed, reversed", base, whole[::-1], packed(whole[::-1], like))
    others = [
        base.garbage(5),
        base.garbage(0),
        *whole[:1],
        base.garbage(70),
        base.garbage(1),
        *whole[1:],
        base.garbage(2),
    ]
    yield variant("packed among others", base, others, packed(others, like))
    others = [base.garbage(66), *whole, base.garbage(3)]
    yield variant("padded among others", base, others, padded(others, like))


def chunks(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Cut sequences, and compute the parts with their states: one part, parts in one batch, token by token."""
    base, like = Base(call, draw), call["x"]
    for number in sorted({0, len(base.spans) - 1} & set(range(len(base.spans)))):
        count = base.lengths[number]
        for cut in sorted({1, 2, 3, count // 2, count - 1} & set(range(1, count))):
            head, tail = base.piece(number, 0, cut), base.piece(number, cut)
            yield variant(f"the first {cut} of sequence {number}", base, [head], padded([head], like))
            yield variant(f"sequence {number} from {cut}", base, [tail], padded([tail], like))
            yield variant(f"sequence {number} cut at {cut}", base, [tail, head], packed([tail, head], like))
        tokens = [base.piece(number, at, at + 1) for at in range(count)][-24:]
        if tokens:
            yield variant(f"tokens of sequence {number}", base, tokens, padded(tokens, like))
            yield variant(f"tokens of sequence {number}, packed", base, tokens, packed(tokens, like))


def beyond(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Put NaN and inf in tokens before ``start``, and in unrelated sequences."""
    base, like = Base(call, draw), call["x"]
    whole = base.whole()
    for number in (torch.nan, torch.inf):
        if "start" in call:
            yield variant(f"padding of {number}", base, whole, padded(whole, like, 0, number))
        if whole:
            others = [base.garbage(5, number), *whole, base.garbage(3, number)]
            yield variant(f"among {number}", base, others, packed(others, like))


TRANSFORMS = {"alone": alone, "together": together, "chunks": chunks}
HYGIENE = {"beyond": beyond}
