"""``Objective``, the frozen and checked options of a loss, and presets; docs/objectives.md has formulas and papers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.grpo_loss.call import CISPO_CAP, CLIP_EPS, FORMS, Estimator, Formula, Numbers

KL_ESTIMATORS = ("k1", "k2", "k3")
LEVELS = ("token", "sequence")
ROLLOUT_MODES = ("truncate", "mask")
ADDED = {"delta", "dual_clip", "rollout_min", "rollout_max", "divisor", "length"}
"""Numbers that are not options of the same name, or that a call adds."""

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
GATES = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
FRAMEWORKS = {**CLIP, "kl_estimator": "k3", "advantage_estimator": "sample", "eps_placement": "add"}
TRL = {**FRAMEWORKS, "importance_level": "token", "kl_correction": True, "eps": 1e-4, "skip_nan": True}
"""The defaults of TRL's configuration, which weights the KL by the ratio unless that is turned off."""
VERL = {**FRAMEWORKS, "kl_correction": False, "eps": 1e-6}
TRL_TYPES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "luspo": {"loss_type": "luspo", "importance_level": "sequence"},
    "cispo": {"loss_type": "cispo", "cispo_cap": 5.0},
    "sapo": {"loss_type": "sapo", **GATES},
    "vespo": {"loss_type": "vespo", **VESPO},
    "gspo": {"loss_type": "grpo", "importance_level": "sequence"},
}
"""TRL's eight loss types and gspo, as its documentation recommends them."""
PRESETS: dict[str, dict[str, Any]] = {
    **{f"trl-{version}:{name}": {**TRL, **TRL_TYPES[name]} for version in ("1.10", "1.16") for name in TRL_TYPES},
    "verl:vanilla": {**VERL, "loss_type": "ppo", "dual_clip": 3.0},
    "verl:gspo": {**VERL, "loss_type": "gspo"},
    "verl:cispo": {**VERL, "loss_type": "cispo", "cispo_floor": 0.8, "cispo_cap": 1.2},
    "verl:sapo": {**VERL, "loss_type": "sapo", **GATES},
    "verl:reinforce": {**VERL, "loss_type": "reinforce"},
    **{name: {**CLIP, "loss_type": name} for name in ("grpo", "bnpo", "ppo", "reinforce")},
    "dr_grpo": {**CLIP, "loss_type": "dr_grpo", "advantage_estimator": "none"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "loss_type": "dapo"},
    "luspo": {**CLIP, "loss_type": "luspo", "importance_level": "sequence"},
    "cispo": {**CLIP, "loss_type": "cispo", "cispo_cap": 5.0},
    "sapo": {**CLIP, "loss_type": "sapo", **GATES},
    "vespo": {**CLIP, "loss_type": "vespo", **VESPO},
    "gspo": {"loss_type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
}
"""Options of ``Objective``, advantages included, that match a framework or a paper, by preset name."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The options of a loss, checked when it is made; ``dataclasses.replace`` returns a copy with some changed.

    docs/objectives.md has the formula and the paper of each loss type.

    Attributes:
        loss_type: the policy term and how it is averaged. ``dapo``, ``bnpo``, ``ppo``, ``cispo``, ``vespo``,
            ``reinforce``: the sum over all tokens divided by a number of tokens. ``grpo``, ``gspo``, ``sapo``: the mean
            over sequences of each sequence's token mean. ``dr_grpo``, ``luspo``: the mean over sequences of each
            sequence's token sum, which ``dr_grpo`` also divides by a length.
        beta: weight of the KL, >= 0.
        clip_low: >= 0; the ratio is clipped below 1 - clip_low. A tie takes the unclipped branch.
        clip_high: >= 0; the ratio is clipped above 1 + clip_high.
        delta: > 0, or None; also caps the ratio in the unclipped branch. Only for types that clip.
        dual_clip: > 1, or None; where A < 0 a term is at most ``-dual_clip A``. Only for ``ppo``, without ``delta``.
        cispo_floor: >= 0; smallest weight of a token in ``cispo``.
        cispo_cap: > 0; largest weight of a token in ``cispo``: the ratio itself, not an offset from 1.
        sapo_temperature_pos: > 0; temperature of the gate of ``sapo`` where A > 0.
        sapo_temperature_neg: > 0; temperature of the gate elsewhere.
        vespo_k_pos: >= 0; exponent k of the weight of ``vespo`` where A >= 0.
        vespo_lambda_pos: > 0; decay lambda of that weight where A >= 0.
        vespo_k_neg: >= 0; exponent k where A < 0.
        vespo_lambda_neg: > 0; decay lambda where A < 0.
        importance_level: ``token``, or ``sequence``: one ratio per sequence, exp of the mean of its log-ratios. The
            default None means ``sequence`` for ``gspo``, which allows no other, and ``token`` for all other types.
        kl_estimator: ``k1`` (-e), ``k2`` (e^2 / 2) or ``k3`` (exp(e) - e - 1), with e = ref - current.
        kl_correction: multiply the KL estimate by the ratio; a gradient flows through that ratio too.
        rollout_mode: ``truncate`` clamps the rollout ratio to [rollout_min, rollout_max]; ``mask`` replaces ratios
            outside it by 0; None uses the ratio unchanged.
        rollout_min: >= 0, by default 0; only with a rollout_mode.
        rollout_max: >= 0, by default unbounded; only with a rollout_mode.
        advantage_estimator: ``population``, ``sample``, ``leave_one_out``, ``none`` or ``batch``, as in
            ``group_advantages``. This and the next three are not read if advantages are given.
        eps: > 0, as in ``group_advantages``.
        eps_placement: ``max`` or ``add``, as in ``group_advantages``.
        skip_nan: leave members whose reward is NaN out of their group.

    Raises:
        TypeError, ValueError: an option is out of range or does not apply to this loss type; the message names it.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    clip_low: float = CLIP_EPS
    clip_high: float = CLIP_EPS
    delta: float | None = None
    dual_clip: float | None = None
    cispo_floor: float = 0.0
    cispo_cap: float = CISPO_CAP
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_level: str | None = None
    kl_estimator: str = "k3"
    kl_correction: bool = False
    rollout_mode: str | None = None
    rollout_min: float | None = None
    rollout_max: float | None = None
    advantage_estimator: str = "population"
    eps: float = 1e-6
    eps_placement: str = "max"
    skip_nan: bool = False

    plan: Formula = field(init=False, repr=False, compare=False)
    """The formula, as the raw ops take it."""
    numbers: Numbers = field(init=False, repr=False, compare=False)
    """The numbers of the formula, without the numbers that a call adds."""
    estimator: Estimator = field(init=False, repr=False, compare=False)
    """The formula of the advantages."""

    def __post_init__(self) -> None:
        """Check every option, and derive ``plan``, ``numbers`` and ``estimator``."""
        check.choice("loss_type", self.loss_type, tuple(FORMS))
        for name in ("beta", "clip_low", "clip_high", "cispo_floor", "vespo_k_pos", "vespo_k_neg"):
            check.number(name, getattr(self, name), least=0)
        for name in ("cispo_cap", *GATES, "vespo_lambda_pos", "vespo_lambda_neg"):
            check.number(name, getattr(self, name), above=0)
        if self.cispo_floor > self.cispo_cap:
            raise ValueError(f"cispo_floor: expected a number <= cispo_cap ({self.cispo_cap}), got {self.cispo_floor}")
        estimator = Estimator.of(self.advantage_estimator, self.eps_placement, self.skip_nan, self.eps)
        # A frozen dataclass allows no other way to set derived fields.
        object.__setattr__(self, "plan", self._plan())
        object.__setattr__(self, "numbers", self._numbers())
        object.__setattr__(self, "estimator", estimator)

    @classmethod
    def preset(cls, name: str) -> Objective:
        """Return the objective of a framework, such as ``trl-1.16:dapo``, or of a paper, such as ``dr_grpo``.

        ``beta`` is 0 in every preset. docs/objectives.md describes each preset and its source.

        Raises:
            ValueError: no preset has that name; the message lists all names.
        """
        if name not in PRESETS:
            raise ValueError(f"name: expected one of {', '.join(PRESETS)}, got {name!r}")
        return cls(**PRESETS[name])

    def _plan(self) -> Formula:
        check.choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check.flag("kl_correction", self.kl_correction)
        if self.rollout_mode is not None:
            check.choice("rollout_mode", self.rollout_mode, ROLLOUT_MODES)
        form = FORMS[self.loss_type]
        return form._replace(
            level=_level(self.loss_type, self.importance_level),
            kl=self.kl_estimator,
            kl_correction="corrected" if self.kl_correction else "plain",
            rollout=self.rollout_mode or "given",
            bounds=_bounds(self.loss_type, form.kind, self.delta, self.dual_clip),
        )

    def _numbers(self) -> Numbers:
        least, most = _rollout_range(self.rollout_mode, self.rollout_min, self.rollout_max)
        given = {name: getattr(self, name) for name in Numbers._fields if name not in ADDED}
        delta, dual_clip = (math.inf if value is None else value for value in (self.delta, self.dual_clip))
        return Numbers(**given, delta=delta, dual_clip=dual_clip, rollout_min=least, rollout_max=most)


def with_overrides(
    objective: Objective | None, loss_type: str | None, beta: float | None, clip_eps: float | None
) -> Objective:
    """Return ``objective``, or ``Objective()`` for None, with the options replaced that a call gives beside it."""
    if objective is None:
        objective = DEFAULT
    elif not isinstance(objective, Objective):
        got = type(objective).__name__
        raise TypeError(f"objective: expected an Objective, got {got}; Objective.preset(name) makes one")
    if loss_type is None and beta is None and clip_eps is None:
        return objective
    if torch.compiler.is_compiling():
        return _changed(objective, loss_type, beta, clip_eps)
    try:
        return _cached_change(objective, loss_type, beta, clip_eps)
    except TypeError:
        # Of a value without a hash, which is an error, the message comes from the check.
        return _changed(objective, loss_type, beta, clip_eps)


def _changed(objective: Objective, loss_type: str | None, beta: float | None, clip_eps: float | None) -> Objective:
    changes: dict[str, object] = {}
    if loss_type is not None:
        changes["loss_type"] = loss_type
    if beta is not None:
        changes["beta"] = beta
    if clip_eps is not None:
        check.number("clip_eps", clip_eps, least=0)
        changes["clip_low"] = changes["clip_high"] = clip_eps
    return replace(objective, **changes)  # type: ignore[arg-type]


# By type too, because True == 1.
_cached_change = functools.lru_cache(maxsize=256, typed=True)(_changed)


def _bounds(loss_type: str, kind: str, delta: float | None, dual_clip: float | None) -> str:
    if delta is not None:
        check.number("delta", delta, above=0)
        if kind != "clip":
            raise ValueError(f"delta: expected None with loss_type {loss_type!r}, which does not clip, got {delta}")
    if dual_clip is not None:
        check.number("dual_clip", dual_clip, above=1)
        if loss_type != "ppo":
            raise ValueError(f"dual_clip: expected None with loss_type {loss_type!r} (only for 'ppo'), got {dual_clip}")
        if delta is not None:
            raise ValueError("delta, dual_clip: expected at most one of them, got both")
    return "delta" if delta is not None else "dual" if dual_clip is not None else "none"


def _level(loss_type: str, level: str | None) -> str:
    if level is not None:
        check.choice("importance_level", level, LEVELS)
    if loss_type == "gspo" and level == "token":
        raise ValueError("importance_level: expected 'sequence' or None with loss_type 'gspo', got 'token'")
    return level or FORMS[loss_type].level


def _rollout_range(mode: str | None, least: float | None, most: float | None) -> tuple[float, float]:
    for name, value in (("rollout_min", least), ("rollout_max", most)):
        if value is not None:
            check.number(name, value, least=0)
            if mode is None:
                raise ValueError(f"{name}: expected None without rollout_mode, got {value}")
    low, high = least or 0.0, math.inf if most is None else most
    if low > high:
        raise ValueError(f"rollout_min: expected a number <= rollout_max ({high}), got {low}")
    return low, high


DEFAULT = Objective()
