"""Sampling from a part of the vocabulary: the smallest logit that is kept, from the sampler to training.

top_k, top_p and min_p keep the tokens whose ``z = logit / temperature`` is at or above some number. Training under
``invariant`` computes z with the same bits, so that this number, 4 bytes a token, says which tokens were kept: it is
the ``min_logit`` of ``linear_logp``. Old and current log-probabilities are of the kept tokens. Those of a reference
model are of the whole vocabulary, as its logits are others: the gradient of TRL's KL is then that of a reference over
the kept tokens, times the probability that the reference gives to them.

After an update other logits reach that number. Where a batch is used again, the ids of the kept tokens are recorded
instead: the ``kept_ids`` of ``linear_logp``, in rollout and training alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rl_kernels.models.clients.trl.head import KEPT_IDS, MIN_LOGIT
from rl_kernels.models.logits import logit_options
from rl_kernels.models.swap import replaced

IN_BATCH = "sampling_per_token_min_logit"
"""Key of TRL's batches: ``[B, T]``, FP32, beside the log-probabilities of the rollout; -inf keeps all tokens."""
IDS_IN_BATCH = "sampling_per_token_kept_ids"
"""In its place where a batch is used again: ``[B, T, n]``, int32, for the token that kept most, n of them; -1 fills the
others' places, and all of a token of a tool."""
TEMPERATURE, SUPPRESSED = "TemperatureLogitsWarper", "SuppressTokensLogitsProcessor"
CUTS = tuple(f"{name}LogitsWarper" for name in ("TopK", "TopP", "MinP", "TopH", "Epsilon", "Eta"))
"""Processors of transformers that keep the tokens with the largest logits."""


class KeptLogp(float):
    """A log-probability over kept tokens: TRL moves it through lists, turn by turn.

    Attributes:
        kept: the smallest z of these tokens, or the list of their ids.
    """

    kept: float | list[int]

    def __new__(cls, logp: float, kept: float | list[int]) -> KeptLogp:
        """Make one from a log-probability and what says which tokens were kept."""
        self = super().__new__(cls, logp)
        self.kept = kept
        return self

    def __reduce__(self) -> tuple[type[KeptLogp], tuple[float, float | list[int]]]:
        """Return what makes a copy, as a gather over processes does too."""
        return type(self), (float(self), self.kept)


class _Divide:
    """Divides logits by the temperature as ``linear_logp`` does; the result waits for ``_Keep``."""

    supports_continuous_batching = True

    def __init__(self, temperature: float) -> None:
        self._temperature, self.z = temperature, torch.empty(0, device="cpu")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # On a GPU, PyTorch multiplies by the reciprocal of a number.
        self.z = scores / scores.new_full((1,), self._temperature)
        return self.z


class _Keep:
    """Keeps what the processors before it kept, ties of the smallest included, and appends the smallest to a list."""

    supports_continuous_batching = True

    def __init__(self, divided: _Divide, smallest: list[torch.Tensor]) -> None:
        self._divided, self._smallest = divided, smallest

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        z = self._divided.z
        least = z.masked_fill(scores == -torch.inf, torch.inf).amin(-1)
        self._smallest.append(least)
        return z.masked_fill(z < least[:, None], -torch.inf)


class _KeepIds:
    """Keeps what the processors before it kept, and appends the ids to a list: ``[B, n]``, -1 after fewer than n."""

    supports_continuous_batching = False

    def __init__(self, divided: _Divide, ids: list[torch.Tensor]) -> None:
        self._divided, self._ids = divided, ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        z = self._divided.z.masked_fill(scores == -torch.inf, -torch.inf)
        largest = z.topk(longest(z > -torch.inf))
        self._ids.append(largest.indices.masked_fill(largest.values == -torch.inf, -1).int())
        return z


def longest(is_kept: torch.Tensor) -> int:
    """Return how many tokens the row keeps that keeps most. Costs a sync on a GPU, as each pass of generate does."""
    return int(is_kept.sum(-1).max())


def reuses_batches(trainer: Any) -> bool:
    """Say whether a trainer uses what it sampled after an update, too."""
    passes = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(trainer.args.gradient_accumulation_steps % passes)


def refusal_of(trainer: Any, model: Any, *, invariant: bool) -> str | None:
    """Return why a trainer's sampler may not drop tokens of a model; None if it may."""
    names = "top_k, top_p, min_p: expected none of them"
    if not invariant:
        return (
            f"{names} with record alone: which tokens were kept follows from logits with the bits of training; "
            "call use_in(trainer, invariant=True)"
        )
    is_generate = not (trainer.use_vllm or trainer.use_transformers_continuous_batching)
    if reuses_batches(trainer) and not is_generate:
        return (
            f"{names} with num_iterations {trainer.num_iterations} and steps_per_generation "
            f"{trainer.args.steps_per_generation} over gradient_accumulation_steps "
            f"{trainer.args.gradient_accumulation_steps}: after an update other logits reach the smallest that was "
            "kept; generate records the ids that were kept instead, continuous batching and vLLM return one number a "
            "token: leave use_vllm and use_transformers_continuous_batching off"
        )
    if model.dtype == torch.float64:
        return f"{names} for a model in FP64: the smallest kept logit is recorded in FP32"
    # Their code for the cap, and some for the scale, rounds in another way than linear_logp.
    for name, neutral in {"softcap": 0.0, "logit_scale": 1.0}.items():
        if logit_options(model)[name] != neutral:
            return f"{names} for a model with a {name} of its logits, {type(model).__name__}"
    return None


def watched(processors: Any, kept: list[torch.Tensor], refusal: str | None = None, *, by_ids: bool = False) -> Any:
    """Return a list of processors, extended by the record of what is kept if it drops tokens.

    Args:
        processors: those that a model's ``generate`` has made.
        kept: gets the smallest kept ``z[B]`` of each pass.
        refusal: why no tokens may be dropped, or None.
        by_ids: record the kept ids, ``[B, n]``, instead.

    Raises:
        ValueError: a processor changes logits in another way, or tokens are dropped and may not be.
    """
    names = [type(each).__name__ for each in processors]
    for name in names:
        if name not in (TEMPERATURE, SUPPRESSED, *CUTS):
            option = "repetition_penalty" if name.startswith("RepetitionPenalty") else "generation_kwargs"
            raise ValueError(
                f"{option}: expected a temperature, top_k, top_p and min_p alone, to record what is sampled; {name} "
                "changes logits in another way"
            )
    # transformers makes one of min_p=0, too, which drops nothing.
    cuts = [each for each, name in zip(processors, names, strict=True) if name in CUTS and getattr(each, "min_p", True)]
    if not cuts:
        return processors
    if refusal is not None:
        raise ValueError(refusal)
    divided = _Divide(next((each.temperature for each in processors if type(each).__name__ == TEMPERATURE), 1.0))
    masks = [each for each, name in zip(processors, names, strict=True) if name == SUPPRESSED]
    keep = (_KeepIds if by_ids else _Keep)(divided, kept)
    return type(processors)([*masks, divided, *cuts, keep])


@contextmanager
def record_kept(model: Any, refusal: str | None, *, by_ids: bool = False) -> Iterator[list[torch.Tensor]]:
    """Collect what each pass of a model that generates keeps, as ``watched`` does; nothing if it drops no tokens.

    Raises:
        RuntimeError: at the end, tokens were generated with processors that nobody saw.
    """
    kept: list[torch.Tensor] = []
    original, is_seen = model._get_logits_processor, False

    def processors(*args: Any, **options: Any) -> Any:
        nonlocal is_seen
        is_seen = True
        return watched(original(*args, **options), kept, refusal, by_ids=by_ids)

    with replaced(model, "_get_logits_processor", processors):
        yield kept
    if not is_seen:
        raise RuntimeError("generate: expected a call of _get_logits_processor, which says what sampling drops")


def with_kept(model: Callable[..., Any], kept: torch.Tensor | None) -> Callable[..., Any]:
    """Return a model whose fused head leaves out what the sampler dropped; TRL calls it for one piece after the other.

    ``kept`` is ``min_logit[B, T]`` or ``kept_ids[B, T, n]`` of the whole batch; with None the model is returned.
    """
    if kept is None:
        return model
    name, values = (MIN_LOGIT, kept.view(torch.int32)) if kept.is_floating_point() else (KEPT_IDS, kept)
    start = 0

    def call(**inputs: Any) -> Any:
        nonlocal start
        piece = values[start : start + len(inputs["input_ids"])]
        start += len(piece)
        if name == KEPT_IDS:
            piece = piece[..., : max(longest(piece >= 0), 1)]
        return model(**inputs, **{name: piece})

    return call


class Carried:
    """Takes what was kept out of TRL's lists of log-probabilities, and puts it into its batches.

    Args:
        trainer: GRPOTrainer, whose ``_generate_single_turn`` returns ``KeptLogp``.
    """

    def __init__(self, trainer: Any) -> None:
        self._rows: list[list[float | list[int] | None]] | None = None
        generate, produce = trainer._generate, trainer._generate_and_score_completions

        def generated(*args: Any, **options: Any) -> Any:
            result = generate(*args, **options)
            logps = next((each for each in result if _are_kept(each)), None)
            # A tool's tokens have a plain 0.
            self._rows = logps and [[getattr(value, "kept", None) for value in values] for values in logps]
            return result

        def produced(*args: Any, **options: Any) -> Any:
            batch = produce(*args, **options)
            kept = self.of(batch["completion_ids"])
            return batch if kept is None else {**batch, IN_BATCH if kept.is_floating_point() else IDS_IN_BATCH: kept}

        trainer._generate, trainer._generate_and_score_completions = generated, produced

    def of(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Return ``min_logit[B, T]`` or ``kept_ids[B, T, n]`` of the last rollout's completions ``[B, T]``.

        None if no token was dropped.
        """
        if self._rows is None:
            return None
        lists = [kept for row in self._rows for kept in row if isinstance(kept, list)]
        if not lists:
            numbers: Any = [[-math.inf if kept is None else kept for kept in row] for row in self._rows]
            return padded(numbers, ids, -math.inf)
        result = torch.full((*ids.shape, max(map(len, lists))), -1, dtype=torch.int32, device="cpu")
        for place, row in zip(result, self._rows, strict=True):
            for number, kept in enumerate(row):
                if isinstance(kept, list):
                    place[number, : len(kept)] = torch.tensor(kept, dtype=torch.int32, device="cpu")
        return result.to(ids.device)


def _are_kept(lists: Any) -> bool:
    """Say whether a part of what ``_generate`` returns has log-probabilities over kept tokens."""
    rows = lists if isinstance(lists, list | tuple) else ()
    return any(isinstance(value, KeptLogp) for row in rows if isinstance(row, list | tuple) for value in row)


def padded(rows: Sequence[Sequence[float]], ids: torch.Tensor, filling: float) -> torch.Tensor:
    """Return numbers of each token as ``[B, T]``, FP32, like the ids of completions, with a number after their ends."""
    result = torch.full(ids.shape, filling, dtype=torch.float32, device="cpu")
    for row, values in zip(result, rows, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
    return result.to(ids.device)
