"""What a loss computes, said once: the objectives of the field, their options, and the form in which raw ops take them.

``Objective.of`` checks the loss keywords of a public function. A raw op takes what decides which formula runs as a
short text (``Plan``), and all numbers in one tensor (``Numbers``), so that a compiled graph is good for all of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from rl_kernels.core import validate as check

CLIP_EPS = 0.2
"""Half-width of the clipping range, where none is given."""
CISPO_CAP = 5.0
"""Cap of the weights of cispo, where none is given: that of its scaling study."""
KL_ESTIMATORS = ("k1", "k2", "k3")
LEVELS = ("token", "sequence")
ROLLOUT_MODES = ("truncate", "mask")


class Form(NamedTuple):
    """How a loss type is put together.

    Attributes:
        kind: the policy term: ``clip``, ``cispo``, ``sapo``, ``vespo`` or ``reinforce``.
        mean: what the terms are divided by: ``tokens``; ``sequences``, of each sequence's mean; or ``sums``, of each
            sequence's sum.
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
"""Every loss type; what tells types of one form apart is checked in ``Objective.of``."""


class Numbers(NamedTuple):
    """The numbers of a loss; a bound that is not there is infinite, a divisor or length that is not given is 0."""

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


class Plan(NamedTuple):
    """Which formula runs; ``text`` and ``parse`` are there and back.

    Attributes:
        kind: as in ``Form``.
        mean: as in ``Form``.
        level: of the importance ratio, ``token`` or ``sequence``.
        kl: ``k1``, ``k2`` or ``k3``.
        kl_correction: ``corrected`` if the KL is weighted by the ratio, otherwise ``plain``.
        rollout: ``truncate``, ``mask``, or ``given`` for a rollout ratio that is taken as it is.
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
        """Return the plan as a raw op takes it."""
        return ",".join(self)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that a text says."""
        return cls(*text.split(","))


class Objective(NamedTuple):
    """A checked objective: which formula, its numbers, and the normaliser, if one is given as a tensor."""

    plan: Plan
    numbers: Numbers
    normaliser: torch.Tensor | None

    @classmethod
    def of(
        cls,
        *,
        loss_type: str,
        clip_eps: float | None,
        clip_low: float | None,
        clip_high: float | None,
        beta: float,
        delta: float | None,
        dual_clip: float | None,
        cispo_floor: float,
        cispo_cap: float,
        sapo_temperature_pos: float,
        sapo_temperature_neg: float,
        vespo_k_pos: float,
        vespo_lambda_pos: float,
        vespo_k_neg: float,
        vespo_lambda_neg: float,
        importance_level: str | None,
        kl_estimator: str,
        kl_correction: bool,
        rollout_mode: str | None,
        rollout_min: float | None,
        rollout_max: float | None,
        num_tokens: float | torch.Tensor | None,
        num_sequences: float | torch.Tensor | None,
        max_completion_length: int | None,
    ) -> Objective:
        """Check the loss keywords of a public function, which says what each is.

        Raises:
            TypeError, ValueError: a keyword is out of range, or means nothing for this loss type; the message names it.
        """
        check.choice("loss_type", loss_type, tuple(FORMS))
        form = FORMS[loss_type]
        low, high = _clip_range(clip_eps, clip_low, clip_high)
        check.number("beta", beta, least=0)
        bounds = _bounds(loss_type, form, delta, dual_clip)
        check.number("cispo_floor", cispo_floor, least=0)
        check.number("cispo_cap", cispo_cap, above=0)
        if cispo_floor > cispo_cap:
            raise ValueError(f"cispo_floor: expected a number <= cispo_cap ({cispo_cap}), got {cispo_floor}")
        for name, value in (("pos", sapo_temperature_pos), ("neg", sapo_temperature_neg)):
            check.number(f"sapo_temperature_{name}", value, above=0)
        for name, k, lam in (("pos", vespo_k_pos, vespo_lambda_pos), ("neg", vespo_k_neg, vespo_lambda_neg)):
            check.number(f"vespo_k_{name}", k, least=0)
            check.number(f"vespo_lambda_{name}", lam, above=0)
        check.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
        flag("kl_correction", kl_correction)
        least, most = _rollout_range(rollout_mode, rollout_min, rollout_max)
        divisor, normaliser = _normaliser(loss_type, form, num_tokens, num_sequences)
        plan = Plan(
            form.kind,
            form.mean,
            _level(loss_type, importance_level),
            kl_estimator,
            "corrected" if kl_correction else "plain",
            rollout_mode or "given",
            bounds,
        )
        numbers = Numbers(
            low,
            high,
            beta,
            0.0,
            math.inf if delta is None else delta,
            math.inf if dual_clip is None else dual_clip,
            cispo_floor,
            cispo_cap,
            sapo_temperature_pos,
            sapo_temperature_neg,
            vespo_k_pos,
            vespo_lambda_pos,
            vespo_k_neg,
            vespo_lambda_neg,
            least,
            most,
            divisor,
            _length(loss_type, max_completion_length),
        )
        return cls(plan, numbers, normaliser)


def flag(name: str, value: Any) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def _clip_range(eps: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    for name, value in (("clip_eps", eps), ("clip_low", low), ("clip_high", high)):
        if value is not None:
            check.number(name, value, least=0)
    if eps is not None and (low is not None or high is not None):
        raise ValueError("clip_eps: expected either it or clip_low and clip_high, got both")
    width = CLIP_EPS if eps is None else eps
    return width if low is None else low, width if high is None else high


def _bounds(loss_type: str, form: Form, delta: float | None, dual_clip: float | None) -> str:
    if delta is not None:
        check.number("delta", delta, above=0)
        if form.kind != "clip":
            raise ValueError(f"delta: expected None with loss_type {loss_type!r}, which does not clip, got {delta}")
    if dual_clip is not None:
        check.number("dual_clip", dual_clip, above=1)
        if loss_type != "ppo":
            raise ValueError(f"dual_clip: expected None with loss_type {loss_type!r}, it is for 'ppo', got {dual_clip}")
        if delta is not None:
            raise ValueError("delta, dual_clip: expected at most one of them, got both")
    return "delta" if delta is not None else "dual" if dual_clip is not None else "none"


def _level(loss_type: str, level: str | None) -> str:
    if level is not None:
        check.choice("importance_level", level, LEVELS)
    if loss_type == "gspo" and level == "token":
        raise ValueError("importance_level: expected 'sequence' or None with loss_type 'gspo', got 'token'")
    return level or ("sequence" if loss_type == "gspo" else "token")


def _rollout_range(mode: str | None, least: float | None, most: float | None) -> tuple[float, float]:
    if mode is not None:
        check.choice("rollout_mode", mode, ROLLOUT_MODES)
    for name, value in (("rollout_min", least), ("rollout_max", most)):
        if value is not None:
            check.number(name, value, least=0)
            if mode is None:
                raise ValueError(f"{name}: expected None without rollout_mode, got {value}")
    low, high = least or 0.0, math.inf if most is None else most
    if low > high:
        raise ValueError(f"rollout_min: expected a number <= rollout_max ({high}), got {low}")
    return low, high


def _normaliser(
    loss_type: str, form: Form, tokens: float | torch.Tensor | None, sequences: float | torch.Tensor | None
) -> tuple[float, torch.Tensor | None]:
    name, value = ("num_tokens", tokens) if form.mean == "tokens" else ("num_sequences", sequences)
    other, unused = ("num_sequences", sequences) if form.mean == "tokens" else ("num_tokens", tokens)
    if unused is not None:
        raise ValueError(f"{other}: expected None with loss_type {loss_type!r}, divided by {name}, got a value")
    if value is None:
        return 0.0, None
    if isinstance(value, torch.Tensor):
        check.tensor(name, value, (*check.FLOATS, *check.INTEGERS), ndim=0)
        return 0.0, value.detach()
    if name == "num_tokens":
        check.number(name, value, least=1)
    else:
        check.number(name, value, above=0)
    return value, None


def _length(loss_type: str, length: int | None) -> float:
    if length is None:
        return 0.0 if loss_type == "dr_grpo" else 1.0
    check.integer("max_completion_length", length, least=1)
    if loss_type != "dr_grpo":
        raise ValueError(f"max_completion_length: expected None with loss_type {loss_type!r}, got {length}")
    return length
