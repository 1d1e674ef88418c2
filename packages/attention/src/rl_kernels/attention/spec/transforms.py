"""Layouts of det_attention that must not change a bit, and garbage that must not reach a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch

from rl_kernels.attention.reference import queries_of
from rl_kernels.attention.spec.places import OF_KEYS, Piece, cache, integers, packed, paged, pieces_of, places_of
from rl_kernels.core.testing import Case, Draw, Inputs, Transform, Variant
from rl_kernels.lab.check.transforms import as_int32, options

LAYOUT_ARGUMENTS = frozenset(
    {
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("k_start", "seqused_q", "seqused_k", "block_table"),
    }
)
"""Arguments that a layout replaces; other arguments stay as they are."""
PAGES = (16, 48, 64, 128)
MOST_TOKENS = 24
"""Largest number of queries that are decoded one at a time."""


class Part(NamedTuple):
    """A range of queries of one sequence of the base call."""

    sequence: int
    queries: slice


def _variant(
    label: str,
    base: Inputs,
    parts: Sequence[Part | None],
    layout: Inputs,
    *,
    keys: bool = False,
    kept_queries: Mapping[int, slice] | None = None,
    kept_keys: Mapping[int, slice] | None = None,
) -> Variant:
    """Return a variant whose sequence j computes ``parts[j]``, or is unrelated (None).

    ``keys`` says that all queries are present, so that gradients of keys can be compared. ``kept_queries`` and
    ``kept_keys`` are, by sequence, the range of queries or keys from the base call; by default all of them.
    """
    call = {name: value for name, value in base.items() if name not in LAYOUT_ARGUMENTS} | layout
    base_places, places = places_of(base), places_of(call)
    computed = [(j, part) for j, part in enumerate(parts) if part is not None]

    def sequence_rows(name: str, j: int, result: torch.Tensor) -> torch.Tensor | None:
        rows = places[j].of(name, result)
        ranges = (kept_keys if name in OF_KEYS else kept_queries) or {}
        return rows[ranges[j]] if rows is not None and j in ranges else rows

    def pick(name: str, result: torch.Tensor) -> torch.Tensor | None:
        if name in OF_KEYS and not keys:
            return None
        results = [base_places[part.sequence].of(name, result) for _, part in computed]
        if not results or any(x is None for x in results):
            return None
        return torch.cat(
            [
                x if name in OF_KEYS else x[part.queries]
                for x, (_, part) in zip(results, computed, strict=True)
                if x is not None
            ]
        )

    def find(name: str, result: torch.Tensor) -> torch.Tensor:
        results = [sequence_rows(name, j, result) for j, _ in computed]
        return torch.cat([x for x in results if x is not None])

    def lift(name: str, upstream: torch.Tensor) -> torch.Tensor:
        q, v = call["q"], call["v"]
        lifted = upstream.new_zeros((*q.shape[:-1], v.shape[-1]))
        if "seqused_q" in call and "seqused_q" not in base:
            lifted.fill_(torch.nan)
        for j, part in computed:
            target, source = sequence_rows(name, j, lifted), base_places[part.sequence].of(name, upstream)
            assert target is not None
            assert source is not None
            target.copy_(source[part.queries])
        return lifted

    return Variant(label, call, pick, find, lift)


class Base:
    """A call, its sequences, and ways to vary them."""

    def __init__(self, case: Case, call: Inputs, draw: Draw) -> None:
        self.case, self.call, self.draw = case, call, draw
        self.pieces = pieces_of(call)

    @property
    def ends(self) -> list[int]:
        """Indices of the first and the last sequence, without duplicates."""
        return sorted({0, len(self.pieces) - 1})

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key, so that later keys and queries can be dropped."""
        return self.call["causal"]

    def whole(self, indices: Sequence[int | None]) -> list[Part | None]:
        """Return the parts with all queries of the sequences ``indices``."""
        return [None if i is None else Part(i, slice(0, len(self.pieces[i].q))) for i in indices]

    def garbage(self, count: int, number: float | None = None) -> Piece:
        """Return an unrelated sequence of ``count`` tokens, filled with ``number`` or random."""
        like = next(iter(self.pieces))
        shapes = [(count, *getattr(like, name).shape[1:]) for name in ("q", "k", "v")]
        if number is None:
            return Piece(*(self.draw.normal(*shape, scale=3.0) for shape in shapes))
        return Piece(*(like.q.new_full(shape, number) for shape in shapes))

    def chunk(self, sequence: int, start: int, stop: int) -> tuple[Part, Piece] | None:
        """Return the queries from ``start`` to ``stop`` and the keys up to the last one; None if too few are left."""
        piece = self.pieces[sequence]
        end = len(piece.k) - len(piece.q) + stop
        if end < stop - start:
            return None
        chunk = Piece(piece.q[start:stop], piece.k[:end], piece.v[:end])
        return Part(sequence, slice(start, stop)), chunk


Build = Callable[[Base], Iterator[Variant]]


def _for_sequences(build: Build, *, cached: bool | None = None) -> Transform:
    """Return the transform that builds variants from a call's sequences; a ``cached`` one has no gradient of keys."""

    def variants(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
        if cached and case.grad:
            return
        if "seqused_q" in call or not call["q"].numel() or bool(_have_dropped_keys(call).any()):
            return
        base = Base(case, call, draw)
        if base.pieces:
            yield from build(base)

    return variants


def _have_dropped_keys(call: Inputs) -> torch.Tensor:
    """Return a mask of the sequences with keys that a cache has dropped."""
    return call["k_start"] < 0 if "k_start" in call else torch.zeros(1, dtype=torch.bool)


def _dense(piece: Piece) -> Inputs:
    return {name: getattr(piece, name)[None] for name in ("q", "k", "v")}


def _alone(base: Base) -> Iterator[Variant]:
    for i in sorted({0, len(base.pieces) // 2, len(base.pieces) - 1}):
        piece = base.pieces[i]
        yield _variant(f"sequence {i} alone", base.call, base.whole([i]), _dense(piece), keys=True)
        yield _variant(f"sequence {i} alone, packed", base.call, base.whole([i]), packed([piece]), keys=True)


def _packed(base: Base) -> Iterator[Variant]:
    count = len(base.pieces)
    for label, order in (("as they come", list(range(count))), ("reversed", list(range(count))[::-1])):
        layout = packed([base.pieces[i] for i in order])
        yield _variant(f"packed, {label}", base.call, base.whole(order), layout, keys=True)
    empty = base.garbage(0)
    for label, number in (("others", None), ("NaN", torch.nan), ("inf", torch.inf)):
        between: list[int | None] = [None, 0, None, None, *range(1, count), None]
        fillers = [base.garbage(5, number), empty, base.garbage(70, number), base.garbage(1, number)]
        chosen = [fillers.pop(0) if i is None else base.pieces[i] for i in between]
        yield _variant(f"packed among {label}", base.call, base.whole(between), packed(chosen), keys=True)


def _batched(base: Base) -> Iterator[Variant]:
    """Batch sequences of equal lengths with unrelated sequences."""
    first = base.pieces[0]
    shapes = first.q.shape, first.k.shape
    alike = [i for i, piece in enumerate(base.pieces) if (piece.q.shape, piece.k.shape) == shapes]
    for count, number in product((1, 4), (None, torch.nan)):
        k = base.garbage(len(first.k), number)
        filler = Piece(base.garbage(len(first.q), number).q, k.k, k.v)
        chosen = [filler] * count + [base.pieces[i] for i in alike]
        layout = {name: torch.stack([getattr(piece, name) for piece in chosen]) for name in ("q", "k", "v")}
        order: list[int | None] = [None] * count + list(alike)
        yield _variant(f"behind {count} of {number}", base.call, base.whole(order), layout, keys=True)


def _left_padded(base: Base) -> Iterator[Variant]:
    """Pad before queries and keys; causal only, because otherwise queries of the padding would see real keys."""
    if not base.causal:
        return
    for pad, i in product((1, 5, 64, 67), base.ends):
        piece, filler = base.pieces[i], base.garbage(pad, torch.nan if pad == 5 else None)
        # Queries are padded as in a trainer, with finite values, unless there are fewer queries than keys.
        queries = base.garbage(pad if len(piece.q) >= len(piece.k) else 0).q
        filler = Piece(queries, filler.k, filler.v)
        layout = {**_dense(filler.before(piece)), "k_start": integers([pad], piece.q)}
        kept_queries, label = {0: slice(len(queries), None)}, f"{pad} of padding before sequence {i}"
        yield _variant(label, base.call, base.whole([i]), layout, keys=True, kept_queries=kept_queries)


def _right_padded(base: Base) -> Iterator[Variant]:
    """Pad at the end: unused queries with a NaN upstream gradient, and keys that no query sees."""
    if not base.causal:
        return
    for pad in (1, 63, 70):
        i = len(base.pieces) - 1
        piece = base.pieces[i]
        layout = {**_dense(piece.before(base.garbage(pad))), "seqused_q": integers([len(piece.q)], piece.q)}
        kept_queries, kept_keys = ({0: slice(0, len(x))} for x in (piece.q, piece.k))
        yield _variant(
            f"{pad} of padding behind",
            base.call,
            base.whole([i]),
            layout,
            keys=True,
            kept_queries=kept_queries,
            kept_keys=kept_keys,
        )


def _chunks(base: Base) -> Iterator[Variant]:
    """Cut queries into chunks, each with the keys up to its end: dense, and packed together."""
    if not base.causal:
        return
    for i in base.ends:
        count = len(base.pieces[i].q)
        if not count:
            continue
        cut = base.draw.integer(0, count) + 1
        bounds = sorted({0, min(cut, count), min(16, count), min(65, count), count})
        chunks = [chunk for a, b in pairwise(bounds) if (chunk := base.chunk(i, a, b))]
        for part, piece in chunks:
            yield _variant(f"{part.queries} of sequence {i}", base.call, [part], _dense(piece))
        if chunks:
            yield _variant(
                "chunks packed", base.call, [part for part, _ in chunks], packed([piece for _, piece in chunks])
            )


def _tokens(base: Base) -> Iterator[Variant]:
    """Decode the last queries, one and several at a time, with a full cache, a longer cache, and pages."""
    if not base.causal:
        return
    for i, width in product(base.ends, (1, 2, 5, 17)):
        count = len(base.pieces[i].q)
        starts = range(max(count - MOST_TOKENS, 0), count - width + 1, width)
        chunks = [chunk for start in starts if (chunk := base.chunk(i, start, start + width))]
        if not chunks:
            continue
        parts, pieces = [part for part, _ in chunks], [piece for _, piece in chunks]
        label = f"{width} at a time"
        yield _variant(f"{label}, cache", base.call, parts, cache(pieces, 5, torch.nan))
        yield _variant(f"{label}, full cache", base.call, parts, cache(pieces, 0, torch.nan))
        yield _variant(f"{label}, pages", base.call, parts, paged(pieces, PAGES[i % 4], torch.nan))


def _dropped(base: Base) -> Iterator[Variant]:
    """Compute queries with a window from a cache that has dropped keys: it has those they see, or a few more."""
    left = (base.call.get("window") or (None, None))[0]
    if not base.causal or left in (None, -1):
        return
    for i in base.ends:
        count, total = len(base.pieces[i].q), len(base.pieces[i].k)
        for width, more in ((1, 0), (3, 0), (count // 2, 5)):
            chunk = base.chunk(i, count - width, count) if 0 < width <= count else None
            dropped = total - width - left - more
            if chunk is None or dropped <= 0:
                continue
            part, piece = chunk
            kept_piece = Piece(piece.q, piece.k[dropped:], piece.v[dropped:])
            start = {"k_start": integers([-dropped], piece.q)}
            label = f"the last {width} of sequence {i}, {dropped} keys dropped"
            yield _variant(label, base.call, [part], {**_dense(kept_piece), **start})
            if not base.case.grad:
                yield _variant(f"{label}, cache", base.call, [part], {**cache([kept_piece], 7, torch.nan), **start})


def _dropped_more(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Compute sequences with dropped keys alone, and with two more segments dropped."""
    have_dropped = _have_dropped_keys(call)
    if not bool(have_dropped.any()):
        return
    yield Variant(
        "two segments more", {**call, "k_start": torch.where(have_dropped, call["k_start"] - 2048, call["k_start"])}
    )
    for b in range(call["q"].shape[0]):
        layout = {name: call[name][b : b + 1] for name in ("q", "k", "v", "k_start")}
        yield _variant(f"sequence {b} alone", call, [Part(b, slice(0, call["q"].shape[1]))], layout, keys=True)


def _paged(base: Base) -> Iterator[Variant]:
    """Put the keys in pages of several sizes, in random order."""
    for size in PAGES:
        total = sum(-(-len(piece.k) // size) for piece in base.pieces)
        order = base.draw.permutation(total + 4)
        layout = paged(base.pieces, size, torch.nan, order)
        yield _variant(f"pages of {size}", base.call, base.whole(range(len(base.pieces))), layout)


def _garbage_beyond(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Put NaN or inf in keys of no sequence, and NaN in queries that are not in use."""
    if "seqused_q" in call and call["q"].numel():
        q, beyond = call["q"].clone(), torch.ones(call["q"].shape[:-2], dtype=torch.bool, device=draw.device)
        for _, place, _ in queries_of(q, call.get("cu_seqlens_q"), call["seqused_q"]):
            beyond[place] = False
        q[beyond] = torch.nan

        def inside(name: str, result: torch.Tensor) -> torch.Tensor:
            # Both calls have zeros there.
            return result

        def lift(name: str, upstream: torch.Tensor) -> torch.Tensor:
            return upstream.masked_fill(beyond[..., None, None], torch.nan)

        yield Variant("NaN in queries not in use", {**call, "q": q}, inside, inside, lift)
    if "cu_seqlens_k" in call or "block_table" in call or not {"k_start", "seqused_k"} & call.keys():
        return
    at = torch.arange(call["k"].shape[1], device=draw.device)
    in_use = torch.ones((call["k"].shape[0], len(at)), dtype=torch.bool, device=draw.device)
    if "k_start" in call:
        in_use &= at >= call["k_start"][:, None]
    if "seqused_k" in call:
        in_use &= at < call["seqused_k"][:, None]
    for number in (torch.nan, torch.inf):
        garbage = {name: call[name].masked_fill(~in_use[..., None, None], number) for name in ("k", "v")}
        yield Variant(f"{number} in keys of no sequence", {**call, **garbage})


def _longest(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Give ``max_seqlen_q`` and ``max_seqlen_k``, exact or larger."""
    for extra in (0, 100):
        maxima: dict[str, Any] = {
            f"max_seqlen_{name}": int(call[f"cu_seqlens_{name}"].diff().max()) + extra
            for name in ("q", "k")
            if f"cu_seqlens_{name}" in call and len(call[f"cu_seqlens_{name}"]) > 1
        }
        if maxima and not maxima.keys() & call.keys():
            yield Variant(f"longest plus {extra}", {**call, **maxima})


def _strided(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    """Lay out operands as models do: heads before tokens, and parts of wider tensors."""

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.full_like(x, torch.nan)), -2)[..., : x.shape[-2], :]

    for label, laid_out in (("heads first", heads_first), ("parts of wider tensors", part)):
        yield Variant(label, {**call, **{name: laid_out(call[name]) for name in ("q", "k", "v")}})


def _default_scale(case: Case, call: Inputs, draw: Draw) -> Iterator[Variant]:
    if "scale" not in call:
        yield Variant("scale by name", {**call, "scale": call["q"].shape[-1] ** -0.5})


TRANSFORMS: Mapping[str, Transform] = {
    "alone": _for_sequences(_alone),
    "packed": _for_sequences(_packed),
    "batched": _for_sequences(_batched),
    "left padded": _for_sequences(_left_padded),
    "right padded": _for_sequences(_right_padded),
    "chunks": _for_sequences(_chunks),
    "tokens": _for_sequences(_tokens, cached=True),
    "paged": _for_sequences(_paged, cached=True),
    "dropped": _for_sequences(_dropped),
    "dropped more": _dropped_more,
    "longest": _longest,
    "strided": _strided,
    "scale": _default_scale,
    "int32": as_int32("cu_seqlens_q", "cu_seqlens_k", "k_start", "seqused_q", "seqused_k", "block_table"),
    "options": options(
        lse={"return_lse": True},
        unlimited_window={"window": (-1, None)},
        no_cap={"softcap": 0.0},
        unchecked={"validate": False},
    ),
}
HYGIENE: Mapping[str, Transform] = {"garbage beyond": _garbage_beyond}
