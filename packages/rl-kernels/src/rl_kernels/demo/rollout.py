"""Sampling with a cache of keys and values, and the log-probabilities of the sampled tokens taken again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_kernels.demo.task import Settings

IGNORE = -100
"""Target of a position whose next token was given, or is padding."""


class Batch(NamedTuple):
    """Prompts with their sampled answers, padded on the right; scored, also the two fields with defaults."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T - 1]: the token that was sampled behind each position, else IGNORE
    logps: Tensor  # [B, T - 1]: its log-probability as the rollout saw it, else 0
    answers: list[tuple[str, str]]  # prompt and sampled text of each row
    rewards: Tensor = torch.empty(0)
    reference: Tensor | None = None  # [B, T - 1]: log-probabilities of the initial policy, for the KL penalty

    @property
    def mask(self) -> Tensor:
        """``[B, T - 1]``, bool: where a token was sampled."""
        return self.targets != IGNORE

    def row(self, row: int) -> Batch:
        """Return one sequence as a rollout of its own, padded as it was."""
        return Batch(*(part[row : row + 1] for part in self[:4]))  # type: ignore[arg-type]


@torch.no_grad()
def sample(model: Any, prompts: Sequence[str], way: Any, settings: Settings, generator: torch.Generator) -> Batch:
    """Sample an answer to each prompt, all rows at once, on the device of the generator.

    What all prompts have goes through the model in one pass; a longer one is fed on while others are sampled already,
    so that no row needs padding and every batch has one shape. Nothing in the loop waits for the device.
    """
    # A prompt has an equals sign, an answer an end.
    vocabulary, longest, device = settings.vocabulary, settings.longest + 1, generator.device
    given = [vocabulary.encode(prompt) for prompt in prompts]
    rows = [[*ids, *[vocabulary.end] * (2 * longest - len(ids))] for ids in given]
    tokens, lengths = torch.tensor(rows, device=device), torch.tensor([[len(ids)] for ids in given], device=device)
    after = torch.arange(1, 2 * longest, device=device)
    is_open = (lengths <= after) & (after < lengths + longest)
    targets, logps = torch.full_like(tokens[:, 1:], IGNORE), torch.zeros(is_open.shape, device=device)
    ended = torch.zeros_like(is_open[:, 0])
    for place, hidden in _decoded(model, tokens, settings):
        noise = torch.empty(len(rows), vocabulary.size, device=device).exponential_(generator=generator)
        drawn, logp = way.draw(model.head, hidden, noise)
        sampled = is_open[:, place] & ~ended
        targets[:, place] = torch.where(sampled, drawn, IGNORE)
        logps[:, place] = torch.where(sampled, logp, 0.0)
        tokens[:, place + 1] = torch.where(sampled, drawn, tokens[:, place + 1])
        ended |= sampled & (drawn == vocabulary.end)
    answers = [vocabulary.decode(token for token in row if token != IGNORE) for row in targets.tolist()]
    return Batch(tokens, targets, logps, list(zip(prompts, answers, strict=True)))


@torch.no_grad()
def decoded_logps(model: Any, batch: Batch, way: Any, settings: Settings) -> Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens, fed to the model as ``sample`` fed them."""
    logps = torch.zeros_like(batch.logps)
    for place, hidden in _decoded(model, batch.tokens, settings):
        logps[:, place] = way.logps(model.head, hidden, batch.targets[:, place])
    return logps


def _decoded(model: Any, tokens: Tensor, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """Yield each place from the last of the shortest prompt on, with its hidden states ``[B, D]``."""
    cache, fed = model.cache(), tokens[:, : settings.shortest + 1]
    for place in range(settings.shortest, tokens.shape[1] - 1):
        yield place, model(fed, cache)[:, -1]
        fed = tokens[:, place + 1 : place + 2]


def training_logps(model: Any, batch: Batch, way: Any) -> Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens by one pass over the whole padded batch."""
    logps: Tensor = way.logps(model.head, model(batch.tokens[:, :-1]), batch.targets)
    return logps
