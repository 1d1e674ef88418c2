"""``audit``: run a model on the same rows in other surroundings, and name the first module whose bits differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from rl_kernels.core import validate as check
from rl_kernels.models.differ import Comparison, Finding
from rl_kernels.models.trace import Seen, watched
from rl_kernels.models.variants import Piece, Variant, of_prompts, of_rows


@dataclass(frozen=True)
class AuditResult:
    """What ``audit`` found.

    Attributes:
        variants: the surroundings that were tried.
        findings: for each variant with differences, the first of them.
        compared: tensors that were compared.
        skipped: modules of which no output could be compared: none has the rows as its first dims.
        culprit: of the findings the one that comes first in the model; None if every bit is the same.
    """

    variants: tuple[str, ...]
    findings: tuple[Finding, ...]
    compared: int
    skipped: tuple[str, ...]
    culprit: Finding | None

    @property
    def passed(self) -> bool:
        """Whether every row that was compared has the same bits in all variants."""
        return not self.findings


@torch.no_grad()
def audit(
    model: nn.Module,
    inputs: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    prompts: int = 4,
    length: int = 23,
    seed: int = 0,
) -> AuditResult:
    """Run a model on samples alone and in other surroundings; compare the bits of what every module takes and gives.

    A causal language model of transformers runs prompts alone, batched and padded on either side, in another place of
    the batch, and through a KV cache in chunks and token by token. Any other model runs rows of a batch alone, all
    together, in reverse, and in two batches. It runs in eval mode and without gradients, and is left as it was.

    Args:
        model: any module.
        inputs: a list of prompts, 1-D tensors of token ids; or a tensor, or a tuple of tensors, whose first dim is the
            samples, at least two: ``model(*inputs)``. None draws random prompts for a model of transformers.
        prompts: how many to draw.
        length: tokens of the longest of them.
        seed: of the draw.

    Raises:
        TypeError, ValueError: an argument is not as above, or nothing could be compared.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    check.integer("prompts", prompts, least=2, most=check.INT32)
    check.integer("length", length, least=2, most=check.INT32)
    check.integer("seed", seed)
    variants = _variants(model, inputs, prompts, length, seed)
    _, alone = next(variants)
    rows, names = Comparison(model), []
    found: list[tuple[int, Finding]] = []
    with _evaluated(model):
        _run(model, alone, rows.remember)
        for name, pieces in variants:
            names.append(name)
            rows.begin(name)
            _run(model, pieces, rows.compare)
            found += [] if rows.first is None else [rows.first]
    if not rows.compared:
        raise ValueError("inputs: no module has them as the first dim of its outputs, so nothing could be compared")
    culprit = min(found, key=lambda one: one[0])[1] if found else None
    return AuditResult(tuple(names), tuple(finding for _, finding in found), rows.compared, rows.skipped, culprit)


def _variants(
    model: nn.Module, inputs: Sequence[torch.Tensor] | torch.Tensor | None, prompts: int, length: int, seed: int
) -> Iterator[Variant]:
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if inputs is None:
        config = getattr(model, "config", None)
        # A model of images and text has the vocabulary in a config of its own.
        text = getattr(config, "get_text_config", lambda: config)()
        vocabulary = getattr(text, "vocab_size", None)
        if not isinstance(vocabulary, int):
            raise ValueError("inputs: expected prompts or a batch for a model whose config has no vocab_size")
        inputs = random_prompts(vocabulary, prompts, length, seed)
    if isinstance(inputs, list) and inputs and all(isinstance(x, torch.Tensor) and x.ndim == 1 for x in inputs):
        if len(inputs) < 2 or not all(len(ids) and not ids.is_floating_point() for ids in inputs):
            raise ValueError("inputs: expected at least two prompts, each 1-D token ids and not empty")
        return of_prompts(model, [ids.to(device) for ids in inputs])
    batch = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if not batch or not all(isinstance(x, torch.Tensor) and x.ndim and len(x) == len(batch[0]) for x in batch):
        raise TypeError("inputs: expected a list of 1-D token ids, or tensors with one first dim")
    if len(batch[0]) < 2:
        raise ValueError(f"inputs: expected at least two samples, got {len(batch[0])}")
    return of_rows(model, [value.to(device) for value in batch])


def random_prompts(vocabulary: int, count: int, length: int, seed: int) -> list[torch.Tensor]:
    """Return prompts of several lengths, the longest of ``length`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(2, length - 6 * index % length) for index in range(count)]
    return [torch.randint(vocabulary, (n,), generator=generator, device="cpu") for n in lengths]


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _run(model: nn.Module, pieces: list[Piece], see: Callable[[Piece, Seen], None]) -> None:
    output = None
    for piece in pieces:
        with watched(model, partial(see, piece)):
            output = piece.run(output if _continues(piece) else None)


def _continues(piece: Piece) -> bool:
    return len(piece.rows) == 1 and piece.rows[0].start > 0
