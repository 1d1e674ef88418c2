"""Count the tokens whose log-prob differs between rollout and training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BOUNDS, CLIP = (0.9, 1.1), 0.2
DISTANCES = tuple(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 3))
"""Nats: from a distance that hardly moves a ratio to one that is seldom seen."""


@dataclass(frozen=True)
class Mismatch:
    """Differences of the log-probs of the same tokens, with the same weights, in training and in a rollout.

    Attributes:
        tokens: number of tokens compared.
        differ: tokens whose log-prob is another number.
        outside: tokens whose ratio, training by rollout, is outside the bounds.
        clipped: tokens whose ratio is outside ``1 - clip`` to ``1 + clip``: PPO takes no gradient from such a token if
            its advantage has the sign of ``ratio - 1``.
        largest: the largest difference, in nats.
        k1, k3: estimates of KL(rollout, training), in nats a token: the means of ``-d`` and of ``exp(d) - 1 - d``, d
            being the log of the ratio (Schulman, "Approximating KL divergence", 2020).
        beyond: for each of ``DISTANCES``, tokens whose log-prob differs by more.
        rerouted: for a mixture, tokens that choose other experts in any layer; None if they were not recorded.
    """

    tokens: int
    differ: int
    outside: int
    clipped: int
    largest: float
    k1: float
    k3: float
    beyond: tuple[int, ...]
    rerouted: int | None = None


def mismatch(
    rollout: torch.Tensor,
    training: torch.Tensor,
    experts: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    bounds: tuple[float, float] = BOUNDS,
    clip: float = CLIP,
) -> Mismatch:
    """Compare FP32 log-probs ``[N]`` of a rollout and of training, and the experts ``[N, choices]`` of both.

    Raises:
        ValueError: a log-prob is not finite.
    """
    for name, logps in (("rollout", rollout), ("training", training)):
        if not logps.isfinite().all():
            raise ValueError(f"{name}: expected finite log-probs, got {float(logps[~logps.isfinite()][0])}")
    log_ratio = training.double() - rollout.double()
    ratio = log_ratio.exp()
    low, high = bounds
    return Mismatch(
        tokens=len(rollout),
        differ=int((rollout != training).sum()),
        outside=_outside(ratio, low, high),
        clipped=_outside(ratio, 1 - clip, 1 + clip),
        largest=float(log_ratio.abs().max()),
        k1=float((rollout.double() - training.double()).mean()),
        k3=float((log_ratio.expm1() - log_ratio).mean()),
        beyond=tuple(int((log_ratio.abs() > distance).sum()) for distance in DISTANCES),
        rerouted=None if experts is None else int((experts[0] != experts[1]).any(-1).sum()),
    )


def _outside(ratio: torch.Tensor, low: float, high: float) -> int:
    return int(((ratio < low) | (ratio > high)).sum())
