"""The sequences of a call, in any layout, and calls made of given sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_kernels.core.testing import Inputs
from rl_kernels.gated_delta.reference import spans

TOKENS = ("q", "k", "v", "g", "beta")
"""Arguments with a row for each token."""
BY_TOKEN = frozenset({"out", *(f"gradient:{name}" for name in TOKENS)})
BY_SEQUENCE = frozenset({"state", "gradient:initial_state"})
LAYOUT = frozenset({*TOKENS, "initial_state", "cu_seqlens", "start"})
"""Arguments that a layout replaces."""


class Tokens(NamedTuple):
    """One sequence: ``[T, ...]`` of each argument by token, and the first state or None."""

    rows: tuple[torch.Tensor, ...]
    state: torch.Tensor | None

    def first(self, count: int) -> Tokens:
        """Return the first tokens."""
        return Tokens(tuple(x[:count] for x in self.rows), self.state)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.rows[0])


def sequences_of(call: Inputs) -> list[Tokens]:
    """Return the sequences of a call."""
    states = call.get("initial_state")
    return [
        Tokens(tuple(call[name][row, tokens] for name in TOKENS), None if states is None else states[number])
        for number, (row, tokens) in enumerate(places_of(call))
    ]


def places_of(call: Inputs) -> list[tuple[int, slice]]:
    """Return the row of the batch and the tokens of each sequence."""
    return list(spans(call["q"], call.get("cu_seqlens"), call.get("start")))


def _states(sequences: Sequence[Tokens]) -> Inputs:
    states = [x.state for x in sequences]
    return {} if states[0] is None else {"initial_state": torch.stack([x for x in states if x is not None])}


def dense(sequences: Sequence[Tokens]) -> Inputs:
    """Return a batch of sequences of one length."""
    rows = zip(*(x.rows for x in sequences), strict=True)
    return {name: torch.stack(parts) for name, parts in zip(TOKENS, rows, strict=True)} | _states(sequences)


def left_padded(sequences: Sequence[Tokens], padding: int, value: float) -> Inputs:
    """Return a batch with padding filled with ``value`` on the left, at least ``padding`` tokens."""
    longest = max(x.length for x in sequences) + padding
    starts = [longest - x.length for x in sequences]
    call: Inputs = {}
    for name, parts in zip(TOKENS, zip(*(x.rows for x in sequences), strict=True), strict=True):
        call[name] = torch.stack(
            [torch.cat((x.new_full((n, *x.shape[1:]), value), x)) for x, n in zip(parts, starts, strict=True)]
        )
    return call | _states(sequences) | {"start": torch.tensor(starts, device=call["q"].device)}


def packed(sequences: Sequence[Tokens]) -> Inputs:
    """Return packed sequences."""
    rows = zip(*(x.rows for x in sequences), strict=True)
    call: Inputs = {name: torch.cat(parts)[None] for name, parts in zip(TOKENS, rows, strict=True)}
    bounds = torch.tensor([0, *(x.length for x in sequences)], device=call["q"].device).cumsum(0)
    return call | _states(sequences) | {"cu_seqlens": bounds}
