"""What a loss computes: ``Objective``, a checked and frozen set of options; each loss type cites the paper it is from.

bnpo: mean over the tokens of the batch, by TRL's name for it; dapo divides alike. Papers, with their arXiv ids:

- grpo: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2402.03300
- dr_grpo: Understanding R1-Zero-Like Training: A Critical Perspective, 2503.20783
- dapo: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2503.14476
- luspo: Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR,
  2602.05261
- cispo: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, 2506.13585; its cap of 5: The Art
  of Scaling Reinforcement Learning Compute for LLMs, 2510.13786
- sapo: Soft Adaptive Policy Optimization, 2511.20347
- vespo: VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training, 2602.10693
- gspo: Group Sequence Policy Optimization, 2507.18071
- ppo: Proximal Policy Optimization Algorithms, 1707.06347; dual_clip: Mastering Complex Control in MOBA Games with Deep
  Reinforcement Learning, 1912.09729
- reinforce: Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning (Machine Learning
  8, 1992); leave_one_out: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
  LLMs, 2402.14740
- delta: INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement Learning, 2505.07291
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import torch

from rl_kernels.core import validate as check
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.plan import CISPO_CAP, CLIP_EPS, FORMS, Numbers, Plan
from rl_kernels.grpo_loss.presets import PRESETS

KL_ESTIMATORS = ("k1", "k2", "k3")
LEVELS = ("token", "sequence")
ROLLOUT_MODES = ("truncate", "mask")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The options of a loss, checked once, when it is made; ``dataclasses.replace`` changes some.

    Attributes:
        loss_type: ``bnpo``, ``dapo``, ``ppo``, ``cispo``, ``vespo``, ``reinforce``: divided by tokens; ``grpo``,
            ``gspo``, ``sapo``: means of each sequence's mean; ``dr_grpo``, ``luspo``: of each sequence's sum.
        beta: weight of the KL, >= 0.
        clip_low: the ratio is clipped at 1 - clip_low, >= 0. A tie takes the unclipped branch.
        clip_high: and at 1 + clip_high, >= 0.
        delta: a cap of the ratio in the unclipped branch too, > 0, for types that clip.
        dual_clip: of ``ppo``: where A < 0 a term is at most ``-dual_clip A``; > 1.
        cispo_floor: least weight of a token in ``cispo``, >= 0.
        cispo_cap: greatest one, the ratio itself and no offset; > 0.
        sapo_temperature_pos: of the gate of ``sapo`` where A > 0; > 0.
        sapo_temperature_neg: elsewhere.
        vespo_k_pos: power of the weight of ``vespo`` where A >= 0; >= 0.
        vespo_lambda_pos: its decay there, > 0.
        vespo_k_neg: power elsewhere.
        vespo_lambda_neg: decay elsewhere.
        importance_level: ``token``, or ``sequence``: one ratio a sequence, exp of the mean of its log-ratios. By
            default ``sequence`` for ``gspo``, which has no other, and ``token`` for all others.
        kl_estimator: ``k1`` (-e), ``k2`` (e^2 / 2) or ``k3`` (e^e - e - 1), with e = ref - current.
        kl_correction: weight the KL estimate by the ratio, whose gradient it then has.
        rollout_mode: ``truncate`` the rollout ratio to the range of the next two, or ``mask`` (0) what lies outside;
            None takes it as it is.
        rollout_min: >= 0.
        rollout_max: >= 0.
        advantage_estimator: ``population``, ``sample``, ``leave_one_out``, ``none`` or ``batch``, as
            ``group_advantages`` has it, with the three that follow. Not read where advantages are given.
        eps: > 0.
        eps_placement: ``max`` or ``add``.
        skip_nan: leave members whose reward is NaN out of their group.

    Raises:
        TypeError, ValueError: an option is out of range, or means nothing for this loss type; the message names it.
    """

    loss_type: str = "bnpo"
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

    plan: Plan = field(init=False, repr=False, compare=False)
    """Which formula runs."""
    numbers: Numbers = field(init=False, repr=False, compare=False)
    """Its numbers, without what a call brings."""
    estimator: Estimator = field(init=False, repr=False, compare=False)
    """How advantages come from rewards."""

    def __post_init__(self) -> None:
        """Check every option, and work out what raw ops take."""
        check.choice("loss_type", self.loss_type, tuple(FORMS))
        for name in ("beta", "clip_low", "clip_high", "cispo_floor", "vespo_k_pos", "vespo_k_neg"):
            check.number(name, getattr(self, name), least=0)
        for name in ("cispo_cap", "sapo_temperature_pos", "sapo_temperature_neg"):
            check.number(name, getattr(self, name), above=0)
        for name in ("vespo_lambda_pos", "vespo_lambda_neg"):
            check.number(name, getattr(self, name), above=0)
        if self.cispo_floor > self.cispo_cap:
            raise ValueError(f"cispo_floor: expected a number <= cispo_cap ({self.cispo_cap}), got {self.cispo_floor}")
        estimator = Estimator.of(self.advantage_estimator, self.eps_placement, self.skip_nan, self.eps)
        # The one way to set what follows from the fields of a frozen class.
        object.__setattr__(self, "plan", self._plan())
        object.__setattr__(self, "numbers", self._numbers())
        object.__setattr__(self, "estimator", estimator)

    @classmethod
    def preset(cls, name: str) -> Objective:
        """Return an objective by name: a framework's, such as ``trl-1.16:dapo``, or a paper's, such as ``dr_grpo``.

        ``beta`` is 0 in all of them. docs/objectives.md says what each is, and where it comes from.

        Raises:
            ValueError: there is no preset of that name; the message lists all.
        """
        if name not in PRESETS:
            raise ValueError(f"name: expected one of {', '.join(PRESETS)}, got {name!r}")
        return cls(**PRESETS[name])

    def _plan(self) -> Plan:
        check.choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check.flag("kl_correction", self.kl_correction)
        if self.rollout_mode is not None:
            check.choice("rollout_mode", self.rollout_mode, ROLLOUT_MODES)
        form = FORMS[self.loss_type]
        return Plan(
            form.kind,
            form.mean,
            _level(self.loss_type, self.importance_level),
            self.kl_estimator,
            "corrected" if self.kl_correction else "plain",
            self.rollout_mode or "given",
            _bounds(self.loss_type, form.kind, self.delta, self.dual_clip),
        )

    def _numbers(self) -> Numbers:
        least, most = _rollout_range(self.rollout_mode, self.rollout_min, self.rollout_max)
        return Numbers(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            beta=self.beta,
            eps=self.eps,
            delta=math.inf if self.delta is None else self.delta,
            dual_clip=math.inf if self.dual_clip is None else self.dual_clip,
            cispo_floor=self.cispo_floor,
            cispo_cap=self.cispo_cap,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
            rollout_min=least,
            rollout_max=most,
        )


def chosen(objective: Objective | None, loss_type: str | None, beta: float | None, clip_eps: float | None) -> Objective:
    """Return the objective of a call: the one given, by default ``Objective()``, with what is given beside it."""
    if objective is None:
        objective = DEFAULT
    elif not isinstance(objective, Objective):
        raise TypeError(f"objective: expected an Objective, got {type(objective).__name__}")
    plain = {type(value) for value in (loss_type, beta, clip_eps)} <= {type(None), str, float, int}
    change = _cached_change if plain and not torch.compiler.is_compiling() else _changed
    return change(objective, loss_type, beta, clip_eps)


def _changed(objective: Objective, loss_type: str | None, beta: float | None, clip_eps: float | None) -> Objective:
    changes: dict[str, object] = {}
    if loss_type is not None:
        changes["loss_type"] = loss_type
    if beta is not None:
        changes["beta"] = beta
    if clip_eps is not None:
        check.number("clip_eps", clip_eps, least=0)
        changes["clip_low"] = changes["clip_high"] = clip_eps
    return replace(objective, **changes) if changes else objective  # type: ignore[arg-type]


_cached_change = functools.lru_cache(maxsize=256)(_changed)


def _bounds(loss_type: str, kind: str, delta: float | None, dual_clip: float | None) -> str:
    if delta is not None:
        check.number("delta", delta, above=0)
        if kind != "clip":
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
