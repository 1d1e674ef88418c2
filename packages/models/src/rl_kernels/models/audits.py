"""``audit``: run a model on the same rows alone and in other batches; name the first module whose bits differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from rl_kernels.core import validate as check
from rl_kernels.models.differ import Comparison, Finding
from rl_kernels.models.logits import in_mode
from rl_kernels.models.trace import TracedTensor, watched
from rl_kernels.models.variants import Piece, Variant, of_prompts, of_rows

LENGTH, ACROSS_CHUNKS = 23, 131
"""Tokens of the longest drawn prompt, and of one that fills two chunks of linear attention and begins a third."""


@dataclass(frozen=True)
class AuditResult:
    """Result of ``audit``.

    Attributes:
        variants: names of the variants that ran, such as ``batched, padded on the left``.
        findings: the first difference of each variant with a difference.
        compared: number of comparisons of tensors.
        skipped: modules without an output that could be compared: no output has the rows as its first dims.
        culprit: the finding that comes first in the model; None if every bit is the same.
        rerouted: for a mixture, name of each variant -> the number of tokens with other experts than alone in any
            layer, and of tokens compared.
    """

    variants: tuple[str, ...]
    findings: tuple[Finding, ...]
    compared: int
    skipped: tuple[str, ...]
    culprit: Finding | None
    rerouted: Mapping[str, tuple[int, int]]

    @property
    def passed(self) -> bool:
        """Whether every compared row has the same bits in all variants."""
        return not self.findings


@torch.no_grad()
def audit(
    model: nn.Module,
    inputs: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    prompts: int = 4,
    length: int | None = None,
    seed: int = 0,
) -> AuditResult:
    """Run a model on samples alone and batched in several ways; compare the bits of every module's inputs and outputs.

    Prompts for a causal language model of transformers run alone, batched and padded on either side, in another place
    of the batch, and through a KV cache in chunks and token by token. The rows of a batch for any other model run
    alone, all together, in reverse order, and in two batches. The model runs in eval mode and without gradients;
    afterwards it is as it was.

    Args:
        model: any module.
        inputs: a list of prompts, 1-D tensors of token ids, at least two; or a tensor, or a tuple of tensors, whose
            first dim is the samples, at least two, for ``model(*inputs)``. None draws random prompts for a model of
            transformers.
        prompts: number of prompts to draw, at least 2.
        length: tokens of the longest drawn prompt, at least 2; by default 23, or 131 for a model with linear attention,
            whose chunks of 64 tokens the prompts must cross.
        seed: seed of the random prompts.

    Returns:
        the variants that ran, and the first difference of each.

    Raises:
        TypeError, ValueError: an argument is not as above, or nothing could be compared; the message says which.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    check.integer("prompts", prompts, least=2, most=check.INT32)
    if length is not None:
        check.integer("length", length, least=2, most=check.INT32)
    check.integer("seed", seed)
    variants = _variants(model, inputs, prompts, length, seed)
    _, alone = next(variants)
    rows, names = Comparison(model), []
    differences: list[tuple[int, Finding]] = []
    rerouted: dict[str, tuple[int, int]] = {}
    with in_mode(model, training=False):
        _run(model, alone, rows.remember)
        for name, pieces in variants:
            names.append(name)
            rows.begin(name)
            _run(model, pieces, rows.compare)
            differences += [] if rows.first is None else [rows.first]
            rerouted |= {} if rows.rerouted is None else {name: rows.rerouted}
    if not rows.compared:
        raise ValueError("inputs: no module has an output with the samples as first dim, nothing could be compared")
    culprit = min(differences, key=lambda difference: difference[0])[1] if differences else None
    findings = tuple(finding for _, finding in differences)
    return AuditResult(tuple(names), findings, rows.compared, rows.skipped, culprit, rerouted)


def _variants(
    model: nn.Module, inputs: Sequence[torch.Tensor] | torch.Tensor | None, prompts: int, length: int | None, seed: int
) -> Iterator[Variant]:
    parameter = next(model.parameters(), None)
    # accelerate's hooks, which load meta weights on demand, move the inputs too.
    device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
    if inputs is None:
        config = getattr(model, "config", None)
        # A model of images and text keeps the vocabulary size in its text config.
        text = getattr(config, "get_text_config", lambda: config)()
        vocabulary = getattr(text, "vocab_size", None)
        if not isinstance(vocabulary, int):
            raise ValueError("inputs: expected prompts or a batch for a model whose config has no vocab_size")
        if length is None:
            length = ACROSS_CHUNKS if "linear_attention" in (getattr(text, "layer_types", None) or ()) else LENGTH
        inputs = random_prompts(vocabulary, prompts, length, seed)
    if isinstance(inputs, list) and inputs and all(isinstance(x, torch.Tensor) and x.ndim == 1 for x in inputs):
        if len(inputs) < 2 or not all(len(ids) and not ids.is_floating_point() for ids in inputs):
            raise ValueError("inputs: expected at least two prompts, each 1-D token ids and not empty")
        return of_prompts(model, [ids.to(device) for ids in inputs])
    batch = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if not batch or not all(isinstance(x, torch.Tensor) and x.ndim and len(x) == len(batch[0]) for x in batch):
        raise TypeError("inputs: expected a list of 1-D token ids, or tensors with the same first dim")
    if len(batch[0]) < 2:
        raise ValueError(f"inputs: expected at least two samples, got {len(batch[0])}")
    return of_rows(model, [value.to(device) for value in batch])


def random_prompts(vocabulary: int, count: int, length: int, seed: int) -> list[torch.Tensor]:
    """Return random prompts of several lengths; the longest has ``length`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(2, length - 6 * index % length) for index in range(count)]
    return [torch.randint(vocabulary, (n,), generator=generator, device="cpu") for n in lengths]


def _run(model: nn.Module, pieces: list[Piece], callback: Callable[[Piece, TracedTensor], None]) -> None:
    output = None
    for piece in pieces:
        with watched(model, partial(callback, piece)):
            output = piece.run(output if _continues_sequence(piece) else None)


def _continues_sequence(piece: Piece) -> bool:
    """Say whether a piece needs the KV cache of the piece before it."""
    return len(piece.rows) == 1 and piece.rows[0].start > 0
