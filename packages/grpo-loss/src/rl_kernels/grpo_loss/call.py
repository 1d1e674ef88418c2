"""The arguments of a raw loss op: tensors by name, formulas as short texts, all numbers of a loss in one tensor.

The numbers are a tensor so that one compiled graph serves all their values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.rowwise.operands import compute_dtype

SUMS = 3
"""Numbers that a loss sums for each sequence: policy term, KL, active tokens; one for each metric follows."""
CLIP_EPS = 0.2
"""Default half-width of the clipping range."""
CISPO_CAP = 5.0
"""Default cap of the weights of cispo, from The Art of Scaling Reinforcement Learning Compute for LLMs (2510.13786)."""


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
        kind: the policy term: ``clip``, ``cispo``, ``sapo``, ``vespo`` or ``reinforce``.
        mean: how terms are averaged: ``tokens``, a mean over tokens; ``sequences``, a mean over sequences of each
            sequence's mean; ``sums``, a mean over sequences of each sequence's sum.
        level: level of the importance ratio, ``token`` or ``sequence``.
        kl: ``k1``, ``k2`` or ``k3``.
        kl_correction: ``corrected`` if the KL is weighted by the ratio, otherwise ``plain``.
        rollout: ``truncate``, ``mask``, or ``given`` for a rollout ratio that is used unchanged.
        bounds: ``delta``, ``dual`` or ``none``: the further bound of the ratio.
    """

    kind: str = "clip"
    mean: str = "tokens"
    level: str = "token"
    kl: str = "k3"
    kl_correction: str = "plain"
    rollout: str = "given"
    bounds: str = "none"

    @property
    def text(self) -> str:
        """Return the formula as the string that a raw op takes as ``plan``."""
        return ",".join(self)

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Return the formula of a string from ``text``."""
        return cls(*text.split(","))


FORMS = {
    "bnpo": Formula("clip", "tokens"),
    "grpo": Formula("clip", "sequences"),
    "dr_grpo": Formula("clip", "sums"),
    "dapo": Formula("clip", "tokens"),
    "luspo": Formula("clip", "sums"),
    "cispo": Formula("cispo", "tokens"),
    "sapo": Formula("sapo", "sequences"),
    "vespo": Formula("vespo", "tokens"),
    "gspo": Formula("clip", "sequences", "sequence"),
    "ppo": Formula("clip", "tokens"),
    "reinforce": Formula("reinforce", "tokens"),
}
"""The formula of each loss type by default; ``objective.Objective`` checks what distinguishes types of one formula."""


ESTIMATORS = ("population", "sample", "leave_one_out", "none", "batch")
PLACEMENTS = ("max", "add")


class Estimator(NamedTuple):
    """The formula of the advantages; ``text`` writes it as a string, ``parse`` reads it back.

    Attributes:
        kind: one of ``ESTIMATORS``.
        placement: of eps: ``max`` divides by max(std, eps), ``add`` by std + eps.
        nan: ``keep``, or ``skip``, which leaves members with a NaN reward out of their group.
    """

    kind: str = "population"
    placement: str = "max"
    nan: str = "keep"

    @classmethod
    def of(cls, advantage_estimator: str, eps_placement: str, skip_nan: bool, eps: float) -> Estimator:
        """Check the advantage keywords of a public function.

        Raises:
            TypeError, ValueError: a keyword has a value that is not allowed; the message names it.
        """
        check.number("eps", eps, above=0)
        check.choice("advantage_estimator", advantage_estimator, ESTIMATORS)
        check.choice("eps_placement", eps_placement, PLACEMENTS)
        check.flag("skip_nan", skip_nan)
        return cls(advantage_estimator, eps_placement, "skip" if skip_nan else "keep")

    @property
    def text(self) -> str:
        """Return the estimator as the string that a raw op takes."""
        return ",".join(self)

    @classmethod
    def parse(cls, text: str) -> Estimator:
        """Return the estimator of a string from ``text``."""
        return cls(*text.split(","))


INPUTS = 13
"""Number of the members of a ``LossCall`` that are not options."""
UNSET: tuple[Any, ...] = (None, "", "", False)
"""The options until they are known."""


class LossCall(NamedTuple):
    """Arguments of ``forward`` and ``forward_grad`` in the order of their schema; ``op`` describes them.

    The public functions make one of their arguments, which ``inputs`` checks and ``loss`` completes: until then its
    members may be of any type, and its options are ``UNSET``.
    """

    current_logps: torch.Tensor
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    rewards: torch.Tensor | None
    boundaries: torch.Tensor | None
    samples: int
    advantages: torch.Tensor | None
    mask: torch.Tensor
    rollout_ratio: torch.Tensor | None
    entropy: torch.Tensor | None
    normalizer: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    numbers: torch.Tensor
    plan: str
    estimator: str
    with_metrics: bool

    @property
    def values(self) -> Numbers:
        """The numbers of the loss by name."""
        return Numbers(*self.numbers.tolist())

    @property
    def formula(self) -> Formula:
        """The formula of the loss."""
        return Formula.parse(self.plan)

    @property
    def advantage_formula(self) -> Estimator:
        """The formula of the advantages."""
        return Estimator.parse(self.estimator)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the loss is computed."""
        return compute_dtype(self.current_logps.dtype)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.current_logps.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def length(self) -> int:
        """T: the padded length of a sequence."""
        return self.current_logps.shape[1] if self.cu_seqlens is None else self.max_seqlen
