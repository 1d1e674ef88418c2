"""GRPO: sample groups with a cache, score them, take a few clipped steps on each padded batch."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl_kernels.core import record_dispatch
from rl_kernels.core.distributed import all_gather, all_reduce, group_rank
from rl_kernels.demo import task
from rl_kernels.demo.measures import Gap, clip_fraction, gap
from rl_kernels.demo.model import make
from rl_kernels.demo.rollout import Batch, decoded_logps, sample, training_logps
from rl_kernels.demo.ways import OURS, Numerics, Stock


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Gap):
    """One step of training, and the gap between its rollout and first training pass, whose weights are the same."""

    step: int
    reward: float
    solved: float  # share of answers that earned the whole reward
    clip_fraction: float  # share of tokens whose ratio the last update on the batch found clipped
    clipped_at_once: float = 0.0  # the same before any update
    rollout_seconds: float
    update_seconds: float
    seconds: float  # the whole step, but without the measures of other numerics
    watched: Mapping[str, Gap]  # the gap in other numerics, of the same weights and tokens, in steps that measure it


class MasterAdamW:
    """AdamW on FP32 masters, rounded into BF16 weights, whose last bits are too coarse for small updates."""

    def __init__(self, weights: Iterable[nn.Parameter], clips: bool = True) -> None:
        self.weights: list[Tensor] = list(weights)
        # FP32 weights are their own masters.
        self.masters: list[Tensor] = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        fused = self.weights[0].is_cuda
        self._adam = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self._clips = clips

    def step(self, rate: float) -> None:
        """Take the gradients from the weights, clip their common norm to 1 if asked to, and step."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        if self._clips:
            nn.utils.clip_grad_norm_(self.masters, 1.0)
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self._adam.zero_grad()


class Trainer:
    """A policy, its frozen initial copy as the reference, and the optimizer; the settings decide what is drawn."""

    def __init__(
        self,
        settings: task.Settings,
        way: Stock = OURS,
        device: str = "cpu",
        *,
        watched: Sequence[Numerics] = (),  # whose gap is measured every few steps; they change nothing
        rollout: Numerics | None = None,  # of a copy that samples in the policy's place
        recompute: bool = False,  # take old log-probabilities from the first training pass, as if it gave only tokens
        # Cuts the policy over ranks. Gradients are then not clipped: their norm would need an exchange of its own.
        cut: Callable[[Any], None] | None = None,
        parts: int = 1,  # micro-batches of a step
        group: ProcessGroup | None = None,  # ranks that run one micro-batch each; None runs all here, one by one
    ) -> None:
        self.settings, self.way, self.device, self.recompute = settings, way, torch.device(device), recompute
        self.parts, self.group, self.draws = parts, group, random.Random(settings.seed)
        self.own, self.watched = Numerics(way, settings.dtype), watched
        self.sampler = rollout or self.own
        self.model = make(settings, self.device, settings.dtype)
        if cut is not None:
            cut(self.model)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if settings.beta else None
        self.copies = {each: make(settings, self.device, each.dtype) for each in {*watched, self.sampler} - {self.own}}
        for each, model in (*self.copies.items(), (self.own, self.model), (self.own, self.reference)):
            if model is not None:
                each.way.take(model)
        self.optimizer = MasterAdamW(self.model.parameters(), clips=cut is None)
        self.backends: dict[str, dict[str, str]] = {}
        """Numerics -> operator -> the backend that ran it in the first step."""
        self.answers: list[tuple[str, str, float]] = []
        """Prompt, answer and reward of all that the last step sampled."""

    def step(self, step: int) -> StepMetrics:
        """Sample one batch, or one for each part, and learn from it."""
        times = [self._now()]
        with self._recorded(self.own, step):
            batches = self.sample()
        times.append(self._now())
        batches = [self._scored(batch) for batch in batches]
        times.append(self._now())
        watched = {}
        for each in self.watched if (step - 1) % self.settings.measure_every == 0 else ():
            with self._recorded(each):
                watched[each.name] = self.compare(each, batches[0])
        times.append(self._now())
        with self._recorded(self.own, step):
            firsts, currents, olds = self._learn(batches, self.settings.rate(step))
        times.append(self._now())
        rewards = torch.cat([batch.rewards for batch in batches])
        logps = torch.cat([batch.logps[batch.mask] for batch in batches])
        first = torch.cat([each[batch.mask] for each, batch in zip(firsts, batches, strict=True)])
        return StepMetrics(
            **vars(gap(logps, first)),
            step=step,
            reward=float(rewards.mean()),
            solved=float((rewards == 1).float().mean()),
            clip_fraction=self._clipped(currents, olds, batches),
            clipped_at_once=self._clipped(firsts, olds, batches),
            rollout_seconds=times[1] - times[0],
            update_seconds=times[4] - times[3],
            seconds=self._now() - times[3] + times[2] - times[0],
            watched=watched,
        )

    def sample(self) -> list[Batch]:
        """Draw prompts and sample a group of answers to each."""
        settings, count, found = self.settings, self.settings.prompts, []
        draws = range(count * self.parts)
        drawn = [task.draw_prompt(self.draws, settings.shortest, settings.longest) for _ in draws]
        seeds = [self.draws.getrandbits(63) for _ in range(self.parts)]
        for part in range(self.parts) if self.group is None else (group_rank(self.group),):
            mine = drawn[part * count : (part + 1) * count]
            prompts = [prompt for prompt in mine for _ in range(settings.samples_per_prompt)]
            generator = torch.Generator(self.device).manual_seed(seeds[part])
            found.append(sample(self.loaded(self.sampler), prompts, self.sampler.way, settings, generator))
        return found

    @torch.no_grad()
    def loaded(self, each: Numerics) -> Any:
        """Return the policy, or its copy in other numerics with the weights of now."""
        if each == self.own:
            return self.model
        each.load(self.copies[each], self.optimizer.masters)
        return self.copies[each]

    @torch.no_grad()
    def compare(self, each: Numerics, batch: Batch, rows: Sequence[int] | None = None) -> Gap:
        """Decode a rollout's tokens again with the weights of now, and compare with one training pass over all of them.

        With ``rows``, these sequences are decoded, each alone.
        """
        model, settings = self.loaded(each), self.settings
        parts = [batch] if rows is None else [batch.row(row) for row in rows]
        decoded = torch.cat([decoded_logps(model, part, each.way, settings) for part in parts])
        chosen = slice(None) if rows is None else list(rows)
        mask = batch.mask[chosen]
        return gap(decoded[mask], training_logps(model, batch, each.way)[chosen][mask])

    def _scored(self, batch: Batch) -> Batch:
        self.answers = [(*pair, task.reward(*pair)) for pair in batch.answers]
        rewards = torch.tensor([reward for _, _, reward in self.answers], device=self.device)
        with torch.no_grad():
            reference = None if self.reference is None else training_logps(self.reference, batch, self.way)
        return batch._replace(rewards=rewards, reference=reference)

    def _learn(self, batches: Sequence[Batch], rate: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Take the steps on the batches; return log-probabilities of the first pass and the last, and the old ones."""
        firsts, currents, olds = list[Tensor](), list[Tensor](), [batch.logps for batch in batches]
        tokens = None
        if self.parts > 1:
            counts = torch.stack([batch.mask.sum() for batch in batches])
            tokens = (counts if self.group is None else all_gather(counts, self.group)).sum()
        for _ in range(self.settings.epochs):
            currents = []
            for place, batch in enumerate(batches):
                current = training_logps(self.model, batch, self.way)
                if self.recompute and not firsts:
                    olds[place] = current.detach()
                self.way.loss(current, olds[place], batch, self.settings, tokens).backward()
                currents.append(current.detach())
            firsts = firsts or currents
            for parameter in self.model.parameters() if self.group is not None else ():
                assert self.group is not None
                # In the order in which one process adds them to .grad.
                parameter.grad = all_reduce(parameter.grad, self.group, order="chain")
            self.optimizer.step(rate)
        return firsts, currents, olds

    def _clipped(self, currents: Sequence[Tensor], olds: Sequence[Tensor], batches: Sequence[Batch]) -> float:
        group, parts = (
            (self.settings.samples_per_prompt, self.settings.clip_eps),
            zip(currents, olds, batches, strict=True),
        )
        return fmean(clip_fraction(new, old, batch.rewards, batch.mask, *group) for new, old, batch in parts)

    @contextmanager
    def _recorded(self, each: Numerics, step: int = 1) -> Iterator[None]:
        """Note backends, in the first step alone: while dispatch is recorded, no launch plan is kept between calls."""
        if step > 1:
            yield
            return
        with record_dispatch() as choices:
            yield
        self.backends.setdefault(each.name, {}).update({choice.operator: choice.backend for choice in choices})

    def _now(self) -> float:
        """Return the time, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
