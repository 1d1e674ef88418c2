"""The form in which raw ops take an objective: the formula as a short text, all numbers in one tensor.

The numbers are a tensor so that one compiled graph serves all their values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CLIP_EPS = 0.2
"""Default half-width of the clipping range."""
CISPO_CAP = 5.0
"""Default cap of the weights of cispo, from The Art of Scaling Reinforcement Learning Compute for LLMs (2510.13786)."""


class Form(NamedTuple):
    """The parts of a loss type.

    Attributes:
        kind: the policy term: ``clip``, ``cispo``, ``sapo``, ``vespo`` or ``reinforce``.
        mean: how terms are averaged: ``tokens``, a mean over tokens; ``sequences``, a mean over sequences of each
            sequence's mean; ``sums``, a mean over sequences of each sequence's sum.
    """

    kind: str
    mean: str


FORMS = {
    "bnpo": Form("clip", "tokens"),
    "grpo": Form("clip", "sequences"),
    "dr_grpo": Form("clip", "sums"),
    "dapo": Form("clip", "tokens"),
    "luspo": Form("clip", "sums"),
    "cispo": Form("cispo", "tokens"),
    "sapo": Form("sapo", "sequences"),
    "vespo": Form("vespo", "tokens"),
    "gspo": Form("clip", "sequences"),
    "ppo": Form("clip", "tokens"),
    "reinforce": Form("reinforce", "tokens"),
}
"""Every loss type; ``objective.Objective`` checks what distinguishes types of one form."""


class Numbers(NamedTuple):
    """The numbers of a loss; unset bounds are inf, unset divisors and lengths 0."""

    clip_low: float = CLIP_EPS
    clip_high: float = CLIP_EPS
    beta: float = 0.0
    eps: float = 0.0
    delta: float = math.inf
    dual_clip: float = math.inf
    cispo_floor: float = 0.0
    cispo_cap: float = CISPO_CAP
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    rollout_min: float = 0.0
    rollout_max: float = math.inf
    divisor: float = 0.0
    length: float = 1.0


class Formula(NamedTuple):
    """The formula of a loss; ``text`` writes it as a string, ``parse`` reads it back.

    Attributes:
        kind: as in ``Form``.
        mean: as in ``Form``.
        level: level of the importance ratio, ``token`` or ``sequence``.
        kl: ``k1``, ``k2`` or ``k3``.
        kl_correction: ``corrected`` if the KL is weighted by the ratio, otherwise ``plain``.
        rollout: ``truncate``, ``mask``, or ``given`` for a rollout ratio that is used unchanged.
        bounds: ``delta``, ``dual`` or ``none``: the further bound of the ratio.
        divisor: ``counted``, or ``given`` if ``Numbers.divisor`` is read.
    """

    kind: str = "clip"
    mean: str = "tokens"
    level: str = "token"
    kl: str = "k3"
    kl_correction: str = "plain"
    rollout: str = "given"
    bounds: str = "none"
    divisor: str = "counted"

    @property
    def text(self) -> str:
        """Return the formula as the string that a raw op takes as ``plan``."""
        return ",".join(self)

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Return the formula of a string from ``text``."""
        return cls(*text.split(","))
