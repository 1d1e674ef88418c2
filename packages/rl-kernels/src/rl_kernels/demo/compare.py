"""Log-probabilities of rollout and training, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.measures import Gap, gap
from rl_kernels.demo.model import Policy
from rl_kernels.demo.numerics import Numerics
from rl_kernels.demo.rollout import IGNORE, Rollout, training_logps

ALONE = 32
"""Sequences that are decoded alone, at most, spread over the rollout; all are decoded together."""


@dataclass(frozen=True)
class Comparison:
    """How one way to decode differs from the training pass over the whole padded batch.

    Attributes:
        numerics: what the model computed with.
        decoding: how many sequences each forward pass took, one token of each.
        gap: between the two.
    """

    numerics: str
    decoding: str
    gap: Gap


@torch.no_grad()
def compare(policy: Policy, rollout: Rollout, numerics: Numerics, temperature: float) -> list[Comparison]:
    """Decode a rollout's tokens again, all sequences together and some alone, and compare with the training pass."""
    policy, arithmetic = numerics.weights(policy), numerics.arithmetic
    training = training_logps(policy, rollout, arithmetic, temperature)
    together = decode(policy, rollout, arithmetic, temperature)
    rows = range(0, len(training), -(-len(training) // ALONE))
    alone = torch.cat([decode(policy, rollout.row(row), arithmetic, temperature) for row in rows])
    return [
        Comparison(numerics.name, f"{len(training)} sequences", gap(together, training, rollout.mask)),
        Comparison(numerics.name, "1 sequence", gap(alone, training[rows], rollout.mask[rows])),
    ]


@torch.no_grad()
def gap_of(policy: Policy, rollout: Rollout, numerics: Numerics, temperature: float) -> Gap:
    """Decode a rollout's tokens again, all sequences together, and compare with the training pass."""
    policy, arithmetic = numerics.weights(policy), numerics.arithmetic
    training = training_logps(policy, rollout, arithmetic, temperature)
    return gap(decode(policy, rollout, arithmetic, temperature), training, rollout.mask)


def decode(policy: Policy, rollout: Rollout, arithmetic: Arithmetic, temperature: float) -> torch.Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens, one position a step, with a cache."""
    cache = policy.cache(len(rollout.tokens))
    logps = torch.zeros_like(rollout.logps)
    for step in range(logps.shape[1]):
        hidden = policy(rollout.tokens[:, step : step + 1], arithmetic, cache)[:, 0]
        logps[:, step] = arithmetic.logp(hidden, policy.head.weight, rollout.targets[:, step], temperature, IGNORE)
    return logps
