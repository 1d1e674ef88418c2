"""The point of the project: log-probabilities of rollout and training, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.bits import different
from rl_kernels.demo.model import Cache, Policy
from rl_kernels.demo.rollout import IGNORE, Rollout, training_logps

ALONE = 32
"""Sequences that are decoded alone, at most, spread over the rollout; all are decoded together."""


@dataclass(frozen=True)
class Comparison:
    """How one way to decode differs from the training pass over the whole padded batch.

    Attributes:
        arithmetic: what the model computed with.
        decoding: how many sequences each forward pass took, one token of each.
        tokens: compared.
        mismatches: tokens that differ in any bit.
        largest: largest absolute difference, in nats.
    """

    arithmetic: str
    decoding: str
    tokens: int
    mismatches: int
    largest: float


@torch.no_grad()
def compare(policy: Policy, rollout: Rollout, arithmetic: Arithmetic, temperature: float) -> list[Comparison]:
    """Decode a rollout's tokens again, all sequences together and some alone, and compare with the training pass."""
    training = training_logps(policy, rollout, arithmetic, temperature)
    together = decode(policy, rollout, arithmetic, temperature)
    rows = range(0, len(training), -(-len(training) // ALONE))
    alone = torch.cat([decode(policy, rollout.row(row), arithmetic, temperature) for row in rows])
    return [
        _comparison(arithmetic.name, f"{len(training)} sequences", together, training, rollout.mask),
        _comparison(arithmetic.name, "1 sequence", alone, training[rows], rollout.mask[rows]),
    ]


def decode(policy: Policy, rollout: Rollout, arithmetic: Arithmetic, temperature: float) -> torch.Tensor:
    """Return ``[B, T - 1]`` log-probabilities of a rollout's tokens, one position a step, with a cache."""
    cache = Cache(policy.config, len(rollout.tokens))
    logps = torch.zeros_like(rollout.logps)
    for step in range(logps.shape[1]):
        hidden = policy(rollout.tokens[:, step : step + 1], arithmetic, cache)[:, 0]
        logps[:, step] = arithmetic.logp(hidden, policy.head.weight, rollout.targets[:, step], temperature, IGNORE)
    return logps


def _comparison(
    arithmetic: str, decoding: str, rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor
) -> Comparison:
    gap = (rollout - training)[mask].abs()
    mismatches = different(rollout, training)[mask].sum()
    return Comparison(arithmetic, decoding, int(mask.sum()), int(mismatches), float(gap.max()))
