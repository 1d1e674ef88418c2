"""The tokens of a rollout with their log-probs, and the batches in which training scores them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

ROWS, PACKED = 4, 2048
"""Sequences of a micro-batch, and tokens of a packed row, which holds at least one sequence."""


class Sample(NamedTuple):
    """A prompt and its completion, on the CPU."""

    prompt: torch.Tensor
    """Token ids ``[P]``."""
    completion: torch.Tensor
    """Token ids ``[T]``."""
    logps: torch.Tensor
    """``[T]``, FP32: log-prob of each token of the completion, as the rollout saw it."""
    experts: torch.Tensor | None = None
    """``[T, choices]``: the experts that the position before each token chose in all layers; None if unknown."""

    @property
    def tokens(self) -> torch.Tensor:
        """The whole sequence ``[P + T]``."""
        return torch.cat((self.prompt, self.completion))


class Place(NamedTuple):
    """Where a completion is in a batch."""

    sample: int
    row: int
    first: int
    """Column of its first token."""


class Batch(NamedTuple):
    """A training pass over some samples."""

    inputs: dict[str, torch.Tensor]
    """``input_ids``, ``position_ids`` and, unless sequences are packed, ``attention_mask``: ``[B, T]``."""
    places: list[Place]


def batches(samples: Sequence[Sample]) -> dict[str, list[Batch]]:
    """Return the batches in which training scores the samples, for each way to batch them."""
    numbered = list(enumerate(samples))
    groups = (numbered[first : first + ROWS] for first in range(0, len(numbered), ROWS))
    return {
        "padded": [_padded(numbered)],
        "micro-batches": [_padded(group) for group in groups],
        "packed": [_packed(row) for row in _rows(numbered)],
    }


def padded(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of (prompt, completion): prompts padded on the left, completions on the right."""
    before, after = (max(len(pair[side]) for pair in parts) for side in (0, 1))
    ids = torch.zeros(len(parts), before + after, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for row, pair in enumerate(parts):
        place = slice(before - len(pair[0]), before + len(pair[1]))
        ids[row, place], mask[row, place] = torch.cat(pair), 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _padded(numbered: Sequence[tuple[int, Sample]]) -> Batch:
    first = max(len(sample.prompt) for _, sample in numbered)
    places = [Place(index, row, first) for row, (index, _) in enumerate(numbered)]
    return Batch(padded([(sample.prompt, sample.completion) for _, sample in numbered]), places)


def _packed(numbered: Sequence[tuple[int, Sample]]) -> Batch:
    places, start = [], 0
    for index, sample in numbered:
        places.append(Place(index, 0, start + len(sample.prompt)))
        start += len(sample.tokens)
    ids = torch.cat([sample.tokens for _, sample in numbered])
    positions = torch.cat([torch.arange(len(sample.tokens), device="cpu") for _, sample in numbered])
    return Batch({"input_ids": ids[None], "position_ids": positions[None]}, places)


def _rows(numbered: Sequence[tuple[int, Sample]]) -> Iterator[list[tuple[int, Sample]]]:
    row: list[tuple[int, Sample]] = []
    for each in numbered:
        if row and sum(len(sample.tokens) for _, sample in (*row, each)) > PACKED:
            yield row
            row = []
        row.append(each)
    yield row
