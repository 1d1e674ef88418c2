"""GRPO: sample groups, score them, take a few clipped steps on each batch."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_kernels.demo import task
from rl_kernels.demo.arithmetic import Arithmetic
from rl_kernels.demo.compare import gap_of
from rl_kernels.demo.invariant import INVARIANT
from rl_kernels.demo.measures import Gap, clip_fraction, gap
from rl_kernels.demo.model import ModelConfig, Policy
from rl_kernels.demo.numerics import OURS_FP32, Numerics
from rl_kernels.demo.rollout import Rollout, sample, training_logps
from rl_kernels.demo.schedule import learning_rate
from rl_kernels.grpo_loss import GRPOLossOutput, grpo_loss


@dataclass(frozen=True)
class Settings:
    """What a run is made of.

    Attributes:
        epochs: optimiser steps on one batch.
        watch_every: steps from one measure of the watched numerics to the next; the first is measured.
    """

    steps: int = 200
    seed: int = 0
    prompts: int = 16
    samples_per_prompt: int = 16
    epochs: int = 2
    learning_rate: float = 4e-3
    warmup_steps: int = 10
    clip_eps: float = 0.2
    beta: float = 0.05
    temperature: float = 1.0
    watch_every: int = 5


@dataclass(frozen=True)
class StepMetrics:
    """One step of training.

    Attributes:
        step: counted from 1.
        reward: mean of the batch.
        solved: share of answers that earned the whole reward.
        kl: mean k3 estimate per token against the initial policy, before the last update on the batch.
        clip_fraction: share of tokens whose ratio the last update on the batch found clipped.
        clipped_at_once: share of tokens whose ratio was clipped before any update.
        gap: between the rollout and the first training pass, whose weights are the same.
        watched: the same gap in other numerics, of the same weights and tokens; empty in steps that measure none.
        seconds: wall time of the step.
    """

    step: int
    reward: float
    solved: float
    kl: float
    clip_fraction: float
    clipped_at_once: float
    gap: Gap
    watched: Mapping[str, Gap]
    seconds: float


class Trainer:
    """A policy, its frozen initial copy as the reference, and the optimiser.

    Args:
        settings: what the run is made of.
        rollout: samples, and takes the log-probabilities that the loss calls old.
        training: computes the passes of reference and updates, on the FP32 weights.
        watched: further numerics whose gap is measured every ``watch_every`` steps; they change nothing.
        recompute: take the old log-probabilities from the first training pass, as trainers do that get only tokens
            from their rollout.
    """

    def __init__(
        self,
        settings: Settings,
        rollout: Numerics = OURS_FP32,
        training: Arithmetic = INVARIANT,
        watched: Sequence[Numerics] = (),
        recompute: bool = False,
    ) -> None:
        self.settings, self.rollout, self.training, self.watched = settings, rollout, training, watched
        self.recompute = recompute
        self.prompts = random.Random(settings.seed)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.policy = Policy(ModelConfig(positions=task.PROMPT_TOKENS + task.ANSWER_TOKENS), self.generator)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def run(self, report: Callable[[StepMetrics], None]) -> list[StepMetrics]:
        """Train for all steps; hand each step's metrics to ``report`` and return them all."""
        history = []
        for step in range(1, self.settings.steps + 1):
            history.append(self.step(step))
            report(history[-1])
        return history

    def step(self, step: int) -> StepMetrics:
        """Sample one batch and learn from it."""
        start = time.perf_counter()
        prompts, rollout = self.sample(self.settings.prompts)
        rewards = torch.tensor([task.reward(*pair) for pair in zip(prompts, rollout.answers, strict=True)])
        watched = self._watch(step, rollout)
        self._set_learning_rate(step)
        with torch.no_grad():
            reference = training_logps(self.reference, rollout, self.training, self.settings.temperature)
        first, output = self._update(rollout, None if self.recompute else rollout.logps, reference, rewards)
        current, old = first, first if self.recompute else rollout.logps
        for _ in range(self.settings.epochs - 1):
            current, output = self._update(rollout, old, reference, rewards)
        return StepMetrics(
            step=step,
            reward=float(rewards.mean()),
            solved=float((rewards == 1).float().mean()),
            kl=float(output.kl),
            clip_fraction=self._clipped(current, old, rewards, rollout.mask),
            clipped_at_once=self._clipped(first, old, rewards, rollout.mask),
            gap=gap(rollout.logps, first, rollout.mask),
            watched=watched,
            seconds=time.perf_counter() - start,
        )

    def sample(self, prompts: int) -> tuple[list[str], Rollout]:
        """Draw prompts and sample a group of answers to each; the prompts are returned once an answer."""
        drawn = [task.draw_prompt(self.prompts) for _ in range(prompts)]
        repeated = [prompt for prompt in drawn for _ in range(self.settings.samples_per_prompt)]
        policy, temperature = self.rollout.weights(self.policy), self.settings.temperature
        rollout = sample(policy, repeated, self.rollout.arithmetic, temperature=temperature, generator=self.generator)
        return repeated, rollout

    def _watch(self, step: int, rollout: Rollout) -> dict[str, Gap]:
        if (step - 1) % self.settings.watch_every:
            return {}
        temperature = self.settings.temperature
        return {each.name: gap_of(self.policy, rollout, each, temperature) for each in self.watched}

    def _set_learning_rate(self, step: int) -> None:
        settings = self.settings
        rate = learning_rate(
            step, steps=settings.steps, peak=settings.learning_rate, warmup_steps=settings.warmup_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _clipped(self, current: torch.Tensor, old: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor) -> float:
        samples, eps = self.settings.samples_per_prompt, self.settings.clip_eps
        return clip_fraction(current, old, rewards, mask, samples_per_prompt=samples, clip_eps=eps)

    def _update(
        self, rollout: Rollout, old: torch.Tensor | None, reference: torch.Tensor, rewards: torch.Tensor
    ) -> tuple[torch.Tensor, GRPOLossOutput]:
        """Take a step of the optimiser; where ``old`` is None, it is what this pass computes."""
        settings = self.settings
        current = training_logps(self.policy, rollout, self.training, settings.temperature)
        output = grpo_loss(
            current,
            current.detach() if old is None else old,
            reference,
            rewards,
            rollout.mask,
            samples_per_prompt=settings.samples_per_prompt,
            clip_eps=settings.clip_eps,
            beta=settings.beta,
        )
        self.optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return current.detach(), output
