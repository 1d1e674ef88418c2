"""Sampling: each forward pass is one token a row, and the log-probability is taken as the token is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_kernels.demo import task, tokenizer
from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.model import Policy

IGNORE = -100
"""Target of a position whose next token was given, or is padding."""


@dataclass(frozen=True)
class Rollout:
    """Prompts with their sampled answers, padded on the right to the longest.

    Attributes:
        tokens: ``[B, T]``, int64.
        targets: ``[B, T - 1]``, int64: the token that was sampled behind each position, else ``IGNORE``.
        logps: ``[B, T - 1]``, FP32: its log-probability as the rollout saw it, else 0.
        answers: the sampled texts.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    logps: torch.Tensor
    answers: list[str]

    @property
    def mask(self) -> torch.Tensor:
        """``[B, T - 1]``, bool: where a token was sampled."""
        return self.targets != IGNORE

    def row(self, row: int) -> Rollout:
        """Return one sequence as a rollout of its own, padded as it was."""
        here = slice(row, row + 1)
        return Rollout(self.tokens[here], self.targets[here], self.logps[here], self.answers[here])


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    arithmetic: Arithmetic,
    *,
    temperature: float,
    generator: torch.Generator,
) -> Rollout:
    """Sample an answer to each prompt, all rows at once, one position a step; prompts are fed in the same way."""
    given = [tokenizer.encode(prompt) for prompt in prompts]
    steps = max(map(len, given)) + task.ANSWER_TOKENS - 1
    lengths = torch.tensor([len(ids) for ids in given])
    tokens = torch.full((len(given), steps + 1), tokenizer.EOS)
    for row, ids in enumerate(given):
        tokens[row, : len(ids)] = torch.tensor(ids)
    targets, logps = torch.full((len(given), steps), IGNORE), torch.zeros(len(given), steps)
    done = torch.zeros(len(given), dtype=torch.bool)
    cache = policy.cache(len(given))

    for step in range(steps):
        hidden = policy(tokens[:, step : step + 1], arithmetic, cache)[:, 0]
        logits = arithmetic.linear(policy.head, hidden).float() / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        sampling = (lengths <= step + 1) & (step + 1 < lengths + task.ANSWER_TOKENS) & ~done
        targets[:, step] = torch.where(sampling, drawn, IGNORE)
        logps[:, step] = arithmetic.logp(hidden, policy.head.weight, targets[:, step], temperature, IGNORE)
        tokens[:, step + 1] = torch.where(sampling, drawn, tokens[:, step + 1])
        done |= sampling & (drawn == tokenizer.EOS)
        if done.all():
            break
    return _trimmed(tokens, targets, logps)


def _trimmed(tokens: torch.Tensor, targets: torch.Tensor, logps: torch.Tensor) -> Rollout:
    used = int((targets != IGNORE).any(0).nonzero().max()) + 1
    sampled = [[token for token in row if token != IGNORE] for row in targets.tolist()]
    answers = [tokenizer.decode(ids) for ids in sampled]
    return Rollout(tokens[:, : used + 1], targets[:, :used], logps[:, :used], answers)


def training_logps(policy: Policy, rollout: Rollout, arithmetic: Arithmetic, temperature: float) -> torch.Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens by one pass over the whole padded batch."""
    hidden = policy(rollout.tokens[:, :-1], arithmetic)
    return arithmetic.logp(hidden, policy.head.weight, rollout.targets, temperature, IGNORE)
