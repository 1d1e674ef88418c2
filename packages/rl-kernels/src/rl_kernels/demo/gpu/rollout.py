"""Sampling with the model's own cache of keys and values: the prompts in one pass, then one position a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.demo.gpu.vocabulary import END, VOCAB, decode, encode
from rl_kernels.demo.gpu.way import Way
from rl_kernels.demo.rollout import IGNORE, Rollout


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[str], way: Way, *, shortest: int, longest: int, generator: torch.Generator
) -> Rollout:
    """Sample an answer to each prompt, all rows at once, on the device of the generator.

    What all prompts have goes through the model in one pass; a longer one is fed on while others are sampled already,
    so that no row needs padding and every batch has one shape. Nothing in the loop waits for the device.

    Args:
        model: a causal language model of transformers.
        prompts: texts of ``shortest`` to ``longest`` tokens.
        way: how to draw.
        shortest: tokens of the shortest prompt, at least 1.
        longest: tokens of the longest prompt, and of the longest answer with its end.
        generator: of all draws.
    """
    tokens, lengths = _padded(prompts, 2 * longest, generator.device)
    after = torch.arange(1, 2 * longest, device=generator.device)
    open_ = (lengths <= after) & (after < lengths + longest)
    targets, logps = torch.full_like(tokens[:, 1:], IGNORE), torch.zeros(open_.shape, device=generator.device)
    ended = torch.zeros_like(open_[:, 0])
    cache = _cache(model)
    fed = tokens[:, :shortest]

    for place in range(shortest - 1, 2 * longest - 1):
        hidden = model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        noise = torch.empty(len(hidden), VOCAB, device=hidden.device).exponential_(generator=generator)
        drawn, logp = way.draw(model.lm_head, hidden, noise)
        sampled = open_[:, place] & ~ended
        targets[:, place] = torch.where(sampled, drawn, IGNORE)
        logps[:, place] = torch.where(sampled, logp, 0.0)
        tokens[:, place + 1] = torch.where(sampled, drawn, tokens[:, place + 1])
        ended |= sampled & (drawn == END)
        fed = tokens[:, place + 1 : place + 2]
    answers = [decode(token for token in row if token != IGNORE) for row in targets.tolist()]
    return Rollout(tokens, targets, logps, answers)


@torch.no_grad()
def decoded_logps(model: Any, rollout: Rollout, way: Way, shortest: int) -> torch.Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens, fed to the model as ``sample`` fed them."""
    logps = torch.zeros_like(rollout.logps)
    cache = _cache(model)
    fed = rollout.tokens[:, :shortest]
    for place in range(shortest - 1, logps.shape[1]):
        hidden = model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logps[:, place] = way.logps(model.lm_head, hidden, rollout.targets[:, place])
        fed = rollout.tokens[:, place + 1 : place + 2]
    return logps


def training_logps(model: Any, rollout: Rollout, way: Way) -> torch.Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens by one pass over the whole padded batch."""
    hidden = model.model(input_ids=rollout.tokens[:, :-1], use_cache=False).last_hidden_state
    return way.logps(model.lm_head, hidden, rollout.targets)


def _padded(prompts: Sequence[str], positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the prompts ``[B, positions]``, padded on the right, and their lengths ``[B, 1]``."""
    given = [encode(prompt) for prompt in prompts]
    rows = [[*ids, *[END] * (positions - len(ids))] for ids in given]
    return torch.tensor(rows, device=device), torch.tensor([[len(ids)] for ids in given], device=device)


def _cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)
