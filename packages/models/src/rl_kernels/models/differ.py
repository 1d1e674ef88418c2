"""Compare the tensors of a model's modules for the same rows in different batches, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rl_kernels.core.ulps import bits_of, ulps
from rl_kernels.models.trace import Place, TracedTensor
from rl_kernels.models.variants import Piece, Row

NOT_RUN, SAME, OTHER = range(3)
"""A token's experts in a variant: not compared, those alone, others."""


@dataclass(frozen=True)
class Finding:
    """The first place where rows of a variant differ from the same rows alone.

    Attributes:
        variant: name of the variant.
        module: dotted name of the module whose own code computed other bits; empty for the model itself.
        type: name of its class.
        place: the tensor that differs: an output of the module, or an input that it computed for a module inside it.
        shape, alone: shape of that tensor here, and when the sample ran alone.
        sample, token: the first row that differs; token is None if samples are not sequences.
        differ, elements: number of elements that differ, and of elements compared; they may be ids of experts.
        ulp: the largest distance, in units in the last place of the tensor's dtype.
    """

    variant: str
    module: str
    type: str
    place: Place
    shape: tuple[int, ...]
    alone: tuple[int, ...]
    sample: int
    token: int | None
    differ: int
    elements: int
    ulp: int

    def __str__(self) -> str:
        name = self.module or "the model"
        which = f"{self.place.kind} {self.place.path}".rstrip()
        if self.place.kind == "input":
            which = f"what it gives to {self.place.module.removeprefix(self.module + '.')}, {which}"
        row = f"sample {self.sample}" + ("" if self.token is None else f", token {self.token}")
        shapes = f"shape {self.shape} here, {self.alone} alone"
        return (
            f"{name} ({self.type}): {which}, {shapes}: {self.differ} of {self.elements} elements differ, "
            f"by up to {self.ulp} ULP, first in {row}"
        )


class Comparison:
    """Stores the tensors of samples that ran alone, and compares the tensors of a variant with them."""

    def __init__(self, model: nn.Module) -> None:
        self._types = {name: type(module).__name__ for name, module in model.named_modules()}
        self._alone: dict[tuple[int, Place], torch.Tensor] = {}
        self._order: dict[Place, int] = {}
        self._variant, self._called = "", set[str]()
        self._rerouted: dict[int, torch.Tensor] = {}
        self.compared = 0
        self.first: tuple[int, Finding] | None = None

    @property
    def skipped(self) -> tuple[str, ...]:
        """Modules without an output that can be compared."""
        compared = {place.module for _, place in self._alone if place.kind == "output"}
        return tuple(sorted(self._called - compared))

    def begin(self, variant: str) -> None:
        """Start another variant."""
        self._variant, self.first, self._rerouted = variant, None, {}

    @property
    def rerouted(self) -> tuple[int, int] | None:
        """Tokens of the variant with other experts than alone in any layer, and tokens compared; None without any."""
        if not self._rerouted:
            return None
        tokens = torch.cat(list(self._rerouted.values()))
        return int((tokens == OTHER).sum()), int((tokens != NOT_RUN).sum())

    def remember(self, piece: Piece, traced: TracedTensor) -> None:
        """Store the rows of a sample that runs alone."""
        self._called.add(traced.place.module)
        self._order.setdefault(traced.place, len(self._order))
        for row in piece.rows:
            value = rows_of(piece, traced.value, row)
            if value is not None:
                self._alone[row.sample, traced.place] = value.clone()

    def compare(self, piece: Piece, traced: TracedTensor) -> None:
        """Compare the rows of a variant with the stored rows."""
        if not traced.value.is_floating_point():
            self._compare_experts(piece, traced)
        order = self._order.get(traced.place)
        if order is None or (self.first is not None and self.first[0] <= order):
            return
        for row in piece.rows:
            here, alone = rows_of(piece, traced.value, row), self._alone.get((row.sample, traced.place))
            if here is None or alone is None:
                continue
            full_shape = tuple(alone.shape)
            if row.length:
                alone = alone[row.start : row.start + row.length]
            if here.shape != alone.shape or here.dtype != alone.dtype:
                continue
            self.compared += 1
            if not torch.equal(bits_of(here), bits_of(alone)):
                self._note(order, traced, row, here, alone, (1, *full_shape))
                return

    def _compare_experts(self, piece: Piece, traced: TracedTensor) -> None:
        """Mark the tokens whose experts, in any order, are not those alone."""
        for row in piece.rows:
            here, alone = rows_of(piece, traced.value, row), self._alone.get((row.sample, traced.place))
            if here is None or alone is None:
                continue
            tokens = slice(row.start, row.start + row.length) if row.length else slice(None)
            here, alone = here.reshape(-1, here.shape[-1]).long(), alone.reshape(-1, alone.shape[-1]).long()
            marks = self._rerouted.setdefault(row.sample, here.new_full((len(alone),), NOT_RUN))
            is_other = (here.sort(-1).values != alone[tokens].sort(-1).values).any(-1)
            marks[tokens] = marks[tokens].maximum(torch.where(is_other, OTHER, SAME))

    def _note(
        self,
        order: int,
        traced: TracedTensor,
        row: Row,
        here: torch.Tensor,
        alone: torch.Tensor,
        full_shape: tuple[int, ...],
    ) -> None:
        distance = ulps(here, alone)
        by_token = distance.flatten(1).amax(1) if row.length and distance.ndim > 1 else distance
        token = row.start + int(by_token.nonzero()[0, 0]) if row.length else None
        shape = tuple(traced.value.shape)
        finding = Finding(
            *(self._variant, traced.maker, self._types[traced.maker], traced.place, shape, full_shape),
            *(row.sample, token, int((distance > 0).sum()), distance.numel(), int(distance.max())),
        )
        self.first = order, finding


def rows_of(piece: Piece, value: torch.Tensor, row: Row) -> torch.Tensor | None:
    """Return a sample's rows of a tensor; None if the tensor's first dims are not the rows of the piece."""
    if piece.tokens is None:
        return value[row.row] if value.ndim and value.shape[0] == piece.batch else None
    if value.ndim and value.shape[0] == piece.batch * piece.tokens and value.shape[:2] != (piece.batch, piece.tokens):
        value = value.unflatten(0, (piece.batch, piece.tokens))
    if value.ndim < 2 or value.shape[1] != piece.tokens or value.shape[0] not in (1, piece.batch):
        return None
    return value[row.row if value.shape[0] > 1 else 0, row.first : row.first + row.length]
