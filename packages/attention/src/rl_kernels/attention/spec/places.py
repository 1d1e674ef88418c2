"""Find the sequences of a call in its arguments and results, and lay them out as packed, cached or paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rl_kernels.core.testing import Inputs

OF_QUERIES = ("out", "lse", "gradient:q")
OF_KEYS = ("gradient:k", "gradient:v")


@dataclass(frozen=True)
class Piece:
    """The operands of one sequence: ``q[T, H, D]``, and its keys and values ``[S, Hkv, D]``.

    The last query stands at the last key.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def before(self, other: Piece) -> Piece:
        """Return a sequence of these tokens and then the other's."""
        return Piece(*(torch.cat((getattr(self, name), getattr(other, name))) for name in ("q", "k", "v")))


@dataclass(frozen=True)
class Place:
    """The place of one sequence: its index in the batch, or None if packed, and its ranges of queries and keys.

    ``keys`` is None if the keys are in pages.
    """

    batch: int | None
    queries: slice
    keys: slice | None

    def of(self, name: str, result: torch.Tensor) -> torch.Tensor | None:
        """Return a view of the sequence's part of a result, queries or keys first; None if it has none."""
        if name in OF_KEYS:
            if self.keys is None:
                return None
            return result[self.keys] if self.batch is None else result[self.batch, self.keys]
        if name not in OF_QUERIES:
            return None
        rows = result.movedim(-1, -2) if name == "lse" else result
        return rows[self.queries] if self.batch is None else rows[self.batch, self.queries]


def places_of(call: Inputs) -> list[Place]:
    """Return the places of the sequences of a call."""
    if "cu_seqlens_q" in call:
        queries = [slice(*ends) for ends in pairwise(call["cu_seqlens_q"].tolist())]
        batches: Sequence[int | None] = [None] * len(queries)
    else:
        batches = range(call["q"].shape[0])
        queries = [slice(0, call["q"].shape[1])] * len(batches)
    keys: list[slice | None] = [None] * len(batches)
    if "cu_seqlens_k" in call:
        keys = [slice(*ends) for ends in pairwise(call["cu_seqlens_k"].tolist())]
    elif "block_table" not in call:
        first = call["k_start"].clamp(min=0).tolist() if "k_start" in call else [0] * len(batches)
        last = call["seqused_k"].tolist() if "seqused_k" in call else [call["k"].shape[1]] * len(batches)
        keys = [slice(a, b) for a, b in zip(first, last, strict=True)]
    return [Place(*place) for place in zip(batches, queries, keys, strict=True)]


def pieces_of(call: Inputs) -> list[Piece]:
    """Return the sequences of a call."""
    pieces = []
    for b, place in enumerate(places_of(call)):
        q = call["q"][place.queries] if place.batch is None else call["q"][place.batch, place.queries]
        pieces.append(Piece(q, *(_keys_of(call, name, b, place) for name in ("k", "v"))))
    return pieces


def _keys_of(call: Inputs, name: str, b: int, place: Place) -> torch.Tensor:
    if place.keys is None:
        return call[name][call["block_table"][b].long()].flatten(0, 1)[: int(call["seqused_k"][b])]
    # Queries may be packed where the keys are not.
    return call[name][place.keys] if "cu_seqlens_k" in call else call[name][b, place.keys]


def integers(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return numbers as an int64 tensor on the device of ``like``."""
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def cumulative(lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return the ``cu_seqlens`` of these lengths."""
    return integers([sum(lengths[:place]) for place in range(len(lengths) + 1)], like)


def packed(pieces: Sequence[Piece]) -> Inputs:
    """Return the arguments that pack these sequences."""
    q, k, v = (torch.cat([getattr(piece, name) for piece in pieces]) for name in ("q", "k", "v"))
    return {
        **{"q": q, "k": k, "v": v},
        "cu_seqlens_q": cumulative([len(piece.q) for piece in pieces], q),
        "cu_seqlens_k": cumulative([len(piece.k) for piece in pieces], q),
    }


def cache(pieces: Sequence[Piece], beyond: int, garbage: float) -> Inputs:
    """Return the arguments that put the keys in a cache with room for more; all sequences have equally many queries."""
    most = max(len(piece.k) for piece in pieces) + beyond
    q = torch.stack([piece.q for piece in pieces])
    call: Inputs = {"q": q}
    for name in ("k", "v"):
        rows = [getattr(piece, name) for piece in pieces]
        call[name] = rows[0].new_full((len(rows), most, *rows[0].shape[1:]), garbage)
        for b, row in enumerate(rows):
            call[name][b, : len(row)] = row
    return {**call, "seqused_k": integers([len(piece.k) for piece in pieces], q)}


def paged(pieces: Sequence[Piece], size: int, garbage: float, order: torch.Tensor | None = None) -> Inputs:
    """Return the arguments that put the keys in pages; queries are dense if each sequence has as many, else packed.

    Args:
        pieces: the sequences.
        size: keys of a page.
        garbage: value of page rows without a key.
        order: permutation of the pages, at least one more than are used; by default ascending.
    """
    counts = [-(-len(piece.k) // size) for piece in pieces]
    total, widest = sum(counts) + 1, max([*counts, 1])
    places = torch.arange(total, device="cpu") if order is None else order.argsort()[:total].argsort()
    first = pieces[0]
    call: Inputs = {}
    for name in ("k", "v"):
        call[name] = getattr(first, name).new_full((total, size, *getattr(first, name).shape[1:]), garbage)
    # Entries after a sequence's own pages name no page.
    table = torch.full((len(pieces), widest), -1, device="cpu")
    first_page = 0
    for b, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        pages = places[first_page : first_page + count]
        first_page += count
        table[b, :count] = pages
        for name in ("k", "v"):
            rows = getattr(piece, name)
            page_rows = call[name][pages.to(rows.device)].flatten(0, 1)
            page_rows[: len(rows)] = rows
            call[name][pages.to(rows.device)] = page_rows.unflatten(0, (count, size))
    lengths = [len(piece.q) for piece in pieces]
    if len(set(lengths)) == 1:
        call["q"] = torch.stack([piece.q for piece in pieces])
    else:
        call["q"] = torch.cat([piece.q for piece in pieces])
        call["cu_seqlens_q"] = cumulative(lengths, first.q)
    call["block_table"] = table.to(first.q.device)
    call["seqused_k"] = integers([len(piece.k) for piece in pieces], first.q)
    return call
