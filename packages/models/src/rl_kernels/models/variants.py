"""The same samples batched, reordered, padded and cut into chunks: a row's bits must not depend on that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from rl_kernels.models.pretrained import is_pretrained

PAD = 3
"""Tokens of padding added to the longest prompt."""
CHUNK = 5
"""Tokens of a chunk; the last tokens of a prompt are decoded one at a time."""


class Row(NamedTuple):
    """Position of a range of a sample's tokens in a batch."""

    sample: int
    row: int
    """Index in the batch."""
    first: int = 0
    """Position of the range's first token in the batch."""
    start: int = 0
    """Position of the range's first token in the sample."""
    length: int = 0


class Piece(NamedTuple):
    """A forward pass over one batch."""

    run: Callable[[Any], Any]
    """Takes the output of the piece before it; returns its own."""
    rows: list[Row]
    batch: int
    tokens: int | None
    """Tokens of a row; None if samples are not sequences: whole rows are compared."""


Variant = tuple[str, list[Piece]]


def of_prompts(model: nn.Module, prompts: Sequence[torch.Tensor]) -> Iterator[Variant]:
    """Yield the variants of prompts, 1-D token ids, for a causal language model; the first is each prompt alone."""
    argument_names = _arguments(model)

    def piece(kwargs: dict[str, Any], rows: list[Row]) -> Piece:
        arguments = {name: value for name, value in kwargs.items() if name in argument_names}

        def run(previous: Any) -> Any:
            cache = {} if previous is None else {"past_key_values": previous.past_key_values}
            return model(**arguments, **cache)

        return Piece(run, rows, *kwargs["input_ids"].shape)

    samples = list(enumerate(prompts))
    yield "alone", [_chunk(piece, index, ids, 0, len(ids), cached=False) for index, ids in samples]
    yield "batched, padded on the left", [_padded(piece, samples, 0, left=True)]
    yield "batched, padded on the right", [_padded(piece, samples, 0, left=False)]
    yield "in another place of the batch", [_padded(piece, samples[::-1], 0, left=True)]
    yield "alone, padded on the left", [_padded(piece, [sample], PAD, left=True) for sample in samples]
    if "past_key_values" in argument_names:
        longest = max(samples, key=lambda sample: len(sample[1]))
        yield f"in chunks of {CHUNK}, the rest token by token", list(_chunks(piece, *longest))


def _arguments(model: nn.Module) -> set[str]:
    """Return the names of a model's arguments; of a wrapper, such as PEFT's, also the inner model's arguments."""
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        inner = next((module for module in model.modules() if is_pretrained(module)), model)
        names |= set(inspect.signature(inner.forward).parameters)
    return names


def _padded(piece: Callable[..., Piece], samples: list[tuple[int, torch.Tensor]], extra: int, *, left: bool) -> Piece:
    width = max(len(ids) for _, ids in samples) + extra
    tokens = samples[0][1].new_zeros(len(samples), width)
    mask, rows = torch.zeros_like(tokens), []
    for row, (sample, ids) in enumerate(samples):
        first = width - len(ids) if left else 0
        tokens[row, first : first + len(ids)] = ids
        mask[row, first : first + len(ids)] = 1
        rows.append(Row(sample, row, first, 0, len(ids)))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    return piece(arguments, rows)


def _chunks(piece: Callable[..., Piece], sample: int, ids: torch.Tensor) -> Iterator[Piece]:
    cuts = [0, *range(CHUNK, len(ids) - CHUNK, CHUNK)]
    cuts += range(cuts[-1] + CHUNK, len(ids) + 1) if len(ids) - cuts[-1] >= CHUNK else [len(ids)]
    for start, stop in pairwise(cuts):
        yield _chunk(piece, sample, ids, start, stop, cached=True)


def _chunk(
    piece: Callable[..., Piece], sample: int, ids: torch.Tensor, start: int, stop: int, *, cached: bool
) -> Piece:
    return piece({"input_ids": ids[None, start:stop], "use_cache": cached}, [Row(sample, 0, 0, start, stop - start)])


def of_rows(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[Variant]:
    """Yield the variants of a batch: tensors whose first dim is the samples; the first is each sample alone."""
    count = len(inputs[0])

    def piece(samples: list[int]) -> Piece:
        chosen = [value[samples] for value in inputs]
        rows = [Row(sample, row) for row, sample in enumerate(samples)]
        return Piece(lambda before: model(*chosen), rows, len(samples), None)

    indices = list(range(count))
    yield "alone", [piece([sample]) for sample in indices]
    yield "batched", [piece(indices)]
    yield "in another place of the batch", [piece(indices[::-1])]
    yield "in two batches", [piece(indices[: count // 2]), piece(indices[count // 2 :])]
