"""Changes of a call that must change no bit, whatever its rows: options, dtypes of integers, ids, memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Transform, Variant
from rl_kernels.core.testing.storage import every_other, garbage


def options(**named: Mapping[str, object]) -> Transform:
    """Return a transform that only changes options: ``options(stats={"return_stats": True})``.

    It yields no variant for an option that the base call sets already: that would be another computation.
    """

    def variants(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
        for label, changes in named.items():
            if not changes.keys() & inputs.keys():
                yield Variant(label.replace("_", " "), {**inputs, **changes})

    return variants


def temperature_as_tensor(ids: str) -> Transform:
    """Return a transform that gives a temperature as a tensor of equal values, of the shape of the argument ``ids``."""

    def variants(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
        temperature = inputs.get("temperature", 1.0)
        if not isinstance(temperature, torch.Tensor):
            value = torch.full(inputs[ids].shape, temperature, device=draw.device)
            yield Variant("temperature as a tensor", {**inputs, "temperature": value})

    return variants


def as_int32(*names: str) -> Transform:
    """Return a transform that gives integer arguments as int32: all, and if there are several, each of them alone."""

    def variants(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
        present = [name for name in names if name in inputs]
        yield Variant("int32", {**inputs, **{name: inputs[name].int() for name in present}})
        if len(present) > 1:
            for name in present:
                yield Variant(f"int32 {name}", {**inputs, name: inputs[name].int()})

    return variants


def bad_ids(
    ids: str, vocabulary: Callable[[Inputs], int], rows: Container[str], sums: Container[str] = ()
) -> Transform:
    """Return a transform that gives the first and the last row an unchecked id out of range.

    Results with ``rows`` are NaN there and keep their bits elsewhere; ``sums`` over rows are NaN. Other results are not
    compared.
    """

    def variants(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
        if "row_indices" in inputs:
            return
        bad = torch.zeros(inputs[ids].shape, dtype=torch.bool, device=draw.device)
        bad.view(-1)[[0, -1]] = True

        def with_nan(name: str, result: torch.Tensor) -> torch.Tensor | None:
            if name in sums:
                return torch.full_like(result, torch.nan)
            if name not in rows:
                return None
            return one_nan(name, result.masked_fill(bad if result.ndim == bad.ndim else bad[..., None], torch.nan))

        for value in (vocabulary(inputs), -1):
            changed = {ids: inputs[ids].masked_fill(bad, value), "validate": False}
            yield Variant(f"id {value}", {**inputs, **changed}, with_nan, one_nan)

    return variants


def one_nan(name: str, result: torch.Tensor) -> torch.Tensor:
    """Return a result with the same NaN for every NaN: sign and payload are not compared."""
    return result.masked_fill(result.isnan(), torch.nan)


def strided(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
    """Store each tensor as every other element of its storage, as the middle of a larger one, or column-major."""
    tensors = _tensors(inputs)
    yield Variant("every other element", {**inputs, **{name: every_other(value) for name, value in tensors.items()}})
    yield Variant("in the middle", {**inputs, **{name: _inside_all_dims(value) for name, value in tensors.items()}})
    swapped = {name: value.mT.contiguous().mT for name, value in tensors.items() if value.ndim >= 2}
    if swapped:
        yield Variant("stored column by column", {**inputs, **swapped})


def offset(case: Case, inputs: Inputs, draw: Draw) -> Iterator[Variant]:
    """Store each tensor at an address that is aligned only to its element size."""
    shifted = {name: _between_garbage(value) for name, value in _tensors(inputs).items()}
    yield Variant("one element into the storage", {**inputs, **shifted})


STORAGE: dict[str, Transform] = {"strided": strided, "offset": offset}
"""Transforms that apply to every operator, whatever its arguments mean."""


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}


def _inside_all_dims(value: torch.Tensor) -> torch.Tensor:
    """Return a copy inside a tensor that is larger by one on each side of every dim."""
    larger = garbage(value, *(size + 2 for size in value.shape))
    return larger[(slice(1, -1),) * value.ndim].copy_(value)


def _between_garbage(value: torch.Tensor) -> torch.Tensor:
    flat = garbage(value, value.numel() + 2)
    return flat[1:-1].view(value.shape).copy_(value)
