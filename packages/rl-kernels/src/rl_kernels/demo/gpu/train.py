"""GRPO with one twin: sample groups with a cache, score them, take a few clipped steps on each padded batch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rl_kernels.core import Choice, record_dispatch
from rl_kernels.demo import task
from rl_kernels.demo.gpu.masters import MasterModel
from rl_kernels.demo.gpu.model import llama
from rl_kernels.demo.gpu.optimizer import MasterAdamW
from rl_kernels.demo.gpu.rollout import sample, training_logps
from rl_kernels.demo.gpu.settings import ModelSizes, Settings
from rl_kernels.demo.gpu.way import Way
from rl_kernels.demo.measures import Gap, clip_fraction, gap
from rl_kernels.demo.rollout import Rollout
from rl_kernels.demo.schedule import learning_rate


@dataclass(frozen=True)
class StepMetrics:
    """One step of training.

    Attributes:
        step: counted from 1.
        reward: mean of the batch.
        solved: share of answers that earned the whole reward.
        kl: of the first training pass from the rollout, nats a token; the weights are the same.
        clip_fraction: share of tokens whose ratio the last update on the batch found clipped.
        tokens: sampled in this step.
        mismatches: tokens whose log-probability differed in any bit between rollout and first training pass.
        ratios_off: tokens whose ratio was not 1 there.
        rollout_seconds: sampling, with the text of the answers.
        update_seconds: all updates on the batch.
        seconds: the whole step, with rewards and measures, but without those in FP32.
        largest: largest ``|ratio - 1|`` of the first training pass.
        fp32: what an FP32 copy of the model showed of the same tokens; None in steps that did not measure it.
    """

    step: int
    reward: float
    solved: float
    kl: float
    clip_fraction: float
    tokens: int
    mismatches: int
    ratios_off: int
    rollout_seconds: float
    update_seconds: float
    seconds: float
    largest: float
    fp32: Gap | None = None


class Twin:
    """A policy and its optimiser, trained in one way; what is drawn follows from the settings alone.

    Its steps are taken within ``taken()``.
    """

    def __init__(self, settings: Settings, sizes: ModelSizes, way: Way, device: torch.device) -> None:
        self.settings, self.way, self.device = settings, way, device
        self.prompts = random.Random(settings.seed)
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        shape = sizes, 2 * (settings.longest + 1), settings.seed, device
        self.model = llama(*shape)
        self.optimizer = MasterAdamW(self.model.parameters())
        self.in_fp32 = MasterModel(llama(*shape, dtype=torch.float32), self.optimizer.masters)
        self.fp32_choices: list[Choice] = []
        """What the last measure in FP32 dispatched."""
        self.answers: list[tuple[str, str, float]] = []
        """Prompt, answer and reward of all that the last step sampled."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let the model and its FP32 copy compute in the twin's way until the end of the context."""
        with self.way.taken(self.model), self.way.taken(self.in_fp32.model):
            yield

    def step(self, step: int) -> StepMetrics:
        """Sample one batch and learn from it."""
        start = self._now()
        prompts, rollout = self._sample()
        sampled = self._now()
        scores = [task.reward(*pair) for pair in zip(prompts, rollout.answers, strict=True)]
        self.answers = list(zip(prompts, rollout.answers, scores, strict=True))
        rewards = torch.tensor(scores, device=self.device)
        scored = self._now()
        fp32 = self._in_fp32(rollout) if step % self.settings.fp32_every == 0 else None
        began = self._now()
        rate = self._learning_rate(step)
        first = current = self._update(rollout, rewards, rate)
        for _ in range(self.settings.epochs - 1):
            current = self._update(rollout, rewards, rate)
        updated = self._now()
        found = gap(rollout.logps, first, rollout.mask)
        return StepMetrics(
            step=step,
            reward=float(rewards.mean()),
            solved=float((rewards == 1).float().mean()),
            kl=found.kl,
            clip_fraction=self._clipped(current, rollout, rewards),
            tokens=found.tokens,
            mismatches=found.mismatches,
            ratios_off=int(((first - rollout.logps).exp() != 1).sum()),
            rollout_seconds=sampled - start,
            update_seconds=updated - began,
            seconds=self._now() - start - (began - scored),
            largest=found.largest,
            fp32=fp32,
        )

    def _in_fp32(self, rollout: Rollout) -> Gap:
        with record_dispatch() as self.fp32_choices:
            return self.in_fp32.gap(rollout, self.way, self.settings.shortest + 1)

    def _clipped(self, current: torch.Tensor, rollout: Rollout, rewards: torch.Tensor) -> float:
        samples, eps = self.settings.samples_per_prompt, self.settings.clip_eps
        return clip_fraction(current, rollout.logps, rewards, rollout.mask, samples_per_prompt=samples, clip_eps=eps)

    def _sample(self) -> tuple[list[str], Rollout]:
        """Draw prompts and sample a group of answers to each; the prompts are returned once an answer."""
        settings = self.settings
        drawn = [task.draw_prompt(self.prompts, settings.shortest, settings.longest) for _ in range(settings.prompts)]
        repeated = [prompt for prompt in drawn for _ in range(settings.samples_per_prompt)]
        # A prompt has an equals sign, an answer an end.
        sizes = {"shortest": settings.shortest + 1, "longest": settings.longest + 1}
        return repeated, sample(self.model, repeated, self.way, **sizes, generator=self.generator)

    def _update(self, rollout: Rollout, rewards: torch.Tensor, rate: float) -> torch.Tensor:
        settings = self.settings
        current = training_logps(self.model, rollout, self.way)
        group = settings.samples_per_prompt, settings.clip_eps
        self.way.loss(current, rollout.logps, rewards, rollout.mask, *group).backward()
        self.optimizer.step(rate)
        return current.detach()

    def _learning_rate(self, step: int) -> float:
        settings = self.settings
        return learning_rate(
            step, steps=settings.steps, peak=settings.learning_rate, warmup_steps=settings.warmup_steps
        )

    def _now(self) -> float:
        """Return the time, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
