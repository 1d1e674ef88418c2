"""Layouts that must change no bit, for operators with one result per row.

A ``RowLayout`` says which arguments and results have rows; the transforms then move, drop, pad and cut rows of any such
operator. Each variant keeps the original rows among others, and compares exactly those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from rl_kernels.core.testing import IGNORED, Case, Draw, Inputs, Transform, Variant
from rl_kernels.core.testing.storage import inside

BATCHES = (1, 2, 3, 4, 9, 16, 17, 33, 65, 129, 257)
"""Batch sizes that rows are tried in: around and beyond tile heights."""
MORE_BATCHES = (63, 64, 65, 127, 128, 256, 2050)
"""More batch sizes, if a row and the arguments shared by all rows have at most ``LITTLE`` numbers."""
LITTLE = 6000
FILLER = -1
"""Entry of a row index for a row that is not from the base call."""


@dataclass(frozen=True)
class RowLayout:
    """The row layout of an operator's arguments and results.

    Attributes:
        arguments: argument -> number of dims of one row (logits 1, target_ids 0); an argument with fewer dims than that
            plus one has no rows.
        results: outputs and gradients with one entry, or row, for each row.
        ids: the argument of token ids, if rows can be masked by ``ignore_index``.
        functions: public functions with this layout; empty for the operator's own.
        any_leading: whether rows may have any number of leading dims, not just one.
        naming: an argument of integers that name rows, as ids of experts do; the number of rows names none.
    """

    arguments: Mapping[str, int]
    results: frozenset[str]
    ids: str | None = None
    functions: frozenset[str] = field(default_factory=lambda: frozenset({""}))
    any_leading: bool = True
    naming: str | None = None

    def transforms(self) -> dict[str, Transform]:
        """Return the standard transforms of rows by name."""
        named = {
            "alone": _alone,
            "batch": _batch,
            "position": _position,
            "neighbors": _neighbors,
            "leading": _leading,
            "chunks": _chunks,
            "padding": _padding,
        }
        return {name: self._bind(transform) for name, transform in named.items()}

    def hygiene(self) -> dict[str, Transform]:
        """Return the transforms that put garbage where nothing may be read, by name."""
        return {"masked": self._bind(_masked)} if self.ids else {}

    def _bind(self, transform: RowTransform) -> Transform:
        def variants(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
            if case.function not in self.functions or "row_indices" in inputs:
                return
            rows = Rows(self, inputs)
            if rows.count:
                yield from transform(rows, draw)

        return variants


class Rows:
    """The flattened rows of one call, from which variants are built."""

    def __init__(self, layout: RowLayout, inputs: Inputs) -> None:
        self.layout = layout
        self.inputs = inputs
        self.flat = {
            name: value.reshape(-1, *value.shape[value.ndim - dims :])
            for name, dims in layout.arguments.items()
            if isinstance(value := inputs.get(name), torch.Tensor) and value.ndim > dims
        }
        self.count = len(next(iter(self.flat.values())))

    def variant(self, label: str, index: torch.Tensor, filler: Inputs | None = None, **changes: object) -> Variant:
        """Return a call whose row j is row ``index[j]`` of the base call, or the next row of ``filler`` (-1)."""
        from_base = index >= 0
        rows = {name: self._gather(value, index, (filler or {}).get(name)) for name, value in self.flat.items()}

        def pick(name: str, result: torch.Tensor) -> torch.Tensor | None:
            return self._flatten(result)[index[from_base]] if name in self.layout.results else None

        def find(name: str, result: torch.Tensor) -> torch.Tensor:
            return result[from_base]

        def lift(name: str, upstream: torch.Tensor) -> torch.Tensor:
            return self._gather(self._flatten(upstream), index, None)

        return Variant(label, {**self.inputs, **rows, **changes}, pick, find, lift)

    def garbage(self, count: int, draw: Draw) -> Inputs:
        """Return filler rows: rows of the base call in random order, floats three times as large."""
        index = draw.permutation(max(count, self.count))[:count] % self.count
        return {
            name: value[index] * 3 if value.is_floating_point() else value[index] for name, value in self.flat.items()
        }

    def shaped(self, label: str, *lead: int) -> Variant:
        """Return the call with its rows in other leading dims; without leading dims, the first row alone."""
        rows = {name: value.reshape(*lead, *value.shape[1:]) if lead else value[0] for name, value in self.flat.items()}

        def pick(name: str, result: torch.Tensor) -> torch.Tensor | None:
            if name not in self.layout.results:
                return result if lead else None
            flat = self._flatten(result)
            return flat if lead else flat[0]

        def find(name: str, result: torch.Tensor) -> torch.Tensor:
            if not lead or name not in self.layout.results:
                return result
            return result.reshape(self.count, *result.shape[len(lead) :])

        def lift(name: str, upstream: torch.Tensor) -> torch.Tensor:
            flat = self._flatten(upstream)
            return flat.reshape(*lead, *flat.shape[1:]) if lead else flat[0]

        return Variant(
            label, {**self.inputs, **{name: value.clone() for name, value in rows.items()}}, pick, find, lift
        )

    def filled(self, count: int, number: float, *, masked: bool = False) -> Inputs:
        """Return filler rows of one number, which are computed unless they are masked."""
        rows = {name: value[:1].expand(count, *value.shape[1:]).clone() for name, value in self.flat.items()}
        for name, value in rows.items():
            # An argument with one number per row, such as a temperature, is checked even in masked rows.
            if self.layout.arguments[name] and value.is_floating_point():
                value.fill_(number)
        if masked:
            rows[self.layout.ids or ""].fill_(IGNORED)
        return rows

    def _flatten(self, result: torch.Tensor) -> torch.Tensor:
        lead = next(self.inputs[name].ndim - self.layout.arguments[name] for name in self.flat)
        return result.reshape(self.count, *result.shape[lead:])

    @staticmethod
    def _gather(value: torch.Tensor, index: torch.Tensor, filler: torch.Tensor | None) -> torch.Tensor:
        rows = value[index.clamp(min=0).to(value.device)]
        missing = (index < 0).to(value.device)
        if filler is not None:
            rows[missing] = filler
        return rows


RowTransform = Callable[[Rows, Draw], Iterator[Variant]]


def _first_middle_last(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1} & set(range(count)))


def _alone(rows: Rows, draw: Draw) -> Iterator[Variant]:
    for row in _first_middle_last(rows.count):
        yield rows.variant(f"row {row} alone", torch.tensor([row]))


def _batch(rows: Rows, draw: Draw) -> Iterator[Variant]:
    shared = [value for name, value in rows.inputs.items() if isinstance(value, torch.Tensor) and name not in rows.flat]
    work = max(value[0].numel() for value in rows.flat.values()) + sum(value.numel() for value in shared)
    for size in (*BATCHES, *MORE_BATCHES) if work <= LITTLE else BATCHES:
        index = torch.arange(size) % rows.count
        yield rows.variant(f"batch of {size}", index)


def _position(rows: Rows, draw: Draw) -> Iterator[Variant]:
    yield rows.variant("rows reversed", torch.arange(rows.count).flip(0))
    yield rows.variant("rows permuted", draw.permutation(rows.count))


def _neighbors(rows: Rows, draw: Draw) -> Iterator[Variant]:
    for row in _first_middle_last(rows.count):
        index = torch.full((rows.count + 1,), FILLER)
        index[row] = row
        yield rows.variant(f"row {row} among others", index, rows.garbage(rows.count, draw))
        for number in (torch.nan, torch.inf, -torch.inf):
            yield rows.variant(f"row {row} among rows of {number}", index, rows.filled(rows.count, number))


def _leading(rows: Rows, draw: Draw) -> Iterator[Variant]:
    if not rows.layout.any_leading:
        return
    yield rows.shaped("no leading dims")
    for shape in ((rows.count,), (1, rows.count), (rows.count, 1, 1), (1, rows.count, 1, 1)):
        yield rows.shaped(f"leading dims {shape}", *shape)
    if rows.count % 2 == 0:
        # Whether rows are evenly spaced cannot be seen from the last two leading dims alone.
        variant = rows.shaped("leading dims cut from larger ones", 2, rows.count // 2, 1)
        cut = {name: inside(variant.inputs[name], dim=1) for name in rows.flat}
        yield replace(variant, inputs={**variant.inputs, **cut})


def _with_padding_rows(rows: Rows) -> Iterator[tuple[str, int, torch.Tensor]]:
    keep = torch.arange(rows.count)
    for count in (1, 5):
        fill = torch.full((count,), FILLER)
        yield f"{count} on the left", count, torch.cat((fill, keep))
        yield f"{count} on the right", count, torch.cat((keep, fill))


def _padding(rows: Rows, draw: Draw) -> Iterator[Variant]:
    for position, count, index in _with_padding_rows(rows):
        yield rows.variant(f"garbage rows, {position}", index, rows.garbage(count, draw))


def _masked(rows: Rows, draw: Draw) -> Iterator[Variant]:
    if rows.inputs.get("ignore_index") not in (None, IGNORED):
        return
    for position, count, index in _with_padding_rows(rows):
        yield rows.variant(
            f"masked rows of NaN, {position}", index, rows.filled(count, torch.nan, masked=True), ignore_index=IGNORED
        )


def _chunks(rows: Rows, draw: Draw) -> Iterator[Variant]:
    if rows.count < 2:
        return
    cut = draw.integer(1, rows.count)
    yield rows.variant(f"rows before the cut at {cut}", torch.arange(cut))
    yield rows.variant(f"rows from the cut at {cut}", torch.arange(cut, rows.count))
