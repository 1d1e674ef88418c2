"""GRPO: sample groups with a cache, score them, take a few clipped steps on each padded batch; what is measured."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl_kernels.core import record_dispatch
from rl_kernels.core.distributed import all_gather, all_reduce, group_rank
from rl_kernels.demo import task
from rl_kernels.demo.model import make
from rl_kernels.demo.ways import OURS, Batch, Numerics, Stock, decoded_logps, sample, training_logps
from rl_kernels.grpo_loss import group_advantages

Record = dict[str, Any]
"""A step, a gap or a comparison, as run.json has it."""


def different(a: Tensor, b: Tensor) -> Tensor:
    """Say for each element of two FP32 tensors of one shape whether any bit differs; those of +0 and -0 do."""
    return a.detach().contiguous().view(torch.int32) != b.detach().contiguous().view(torch.int32)


def gap(rollout: Tensor, training: Tensor) -> Record:
    """Return how log-probabilities ``[N]`` of a rollout, FP32, differ from those of training with the same weights."""
    log_ratio = training.double() - rollout.double()
    return {
        "tokens": len(rollout),
        "mismatches": int(different(rollout, training).sum()),  # tokens that differ in any bit
        # Of training from rollout, nats a token: the mean of k3, r - 1 - log r with r their ratio in FP64.
        "kl": float((log_ratio.expm1() - log_ratio).mean()),
        "largest": float(log_ratio.expm1().abs().max()),  # |r - 1|; like kl it is 0 only if no token differs
        "ratios_off": int(((training - rollout).exp() != 1).sum()),  # tokens whose ratio is not 1 in FP32, as in a loss
    }


def clip_fraction(current: Tensor, batch: Batch, settings: task.Settings) -> float:
    """Return the share of the tokens whose ratio is clipped."""
    advantages = group_advantages(batch.rewards, samples_per_prompt=settings.samples_per_prompt)[:, None]
    ratio, eps = (current - batch.old).exp(), settings.clip_eps
    clipped = ((ratio > 1 + eps) & (advantages > 0)) | ((ratio < 1 - eps) & (advantages < 0))
    return float(clipped[batch.mask].float().mean())


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
        # Cuts the policy over ranks. Gradients are then not clipped: their norm would need an exchange of its own.
        cut: Callable[[Any], None] | None = None,
        parts: int = 1,  # micro-batches of a step
        group: ProcessGroup | None = None,  # ranks that run one micro-batch each; None runs all here, one by one
    ) -> None:
        self.settings, self.way, self.device = settings, way, torch.device(device)
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
        # BF16 is too coarse for small updates: AdamW takes its steps on FP32 copies of the weights.
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.model.parameters()]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.clips = cut is None
        self.backends: dict[str, dict[str, str]] = {}
        """Numerics -> operator -> the backend that ran it in the first step."""
        self.answers: list[tuple[str, str, float]] = []
        """Prompt, answer and reward of all that the last step sampled."""

    def step(self, step: int) -> Record:
        """Sample a batch, and learn from it; the gap is between its rollout and the first training pass."""
        batch, rollout_seconds = self._done(self.own, step, self.sample)
        batch, score_seconds = self._done(self.own, step, self.scored, batch)
        measured = self.watched if (step - 1) % self.settings.measure_every == 0 else ()
        watched = {each.name: self._done(each, step, self.compare, each, batch)[0] for each in measured}
        (first, last), update_seconds = self._done(self.own, step, self._learned, batch, self.settings.rate(step))
        return {
            **gap(batch.logps[batch.mask], first[batch.mask]),
            "step": step,
            "reward": float(batch.rewards.mean()),
            "solved": float((batch.rewards == 1).float().mean()),  # share of answers that earned the whole reward
            "clip_fraction": clip_fraction(last, batch, self.settings),  # as the last update on the batch found it
            "clipped_at_once": clip_fraction(first, batch, self.settings),  # before any update
            "rollout_seconds": rollout_seconds,
            "update_seconds": update_seconds,
            "seconds": rollout_seconds + score_seconds + update_seconds,
            "watched": watched,  # the gap in other numerics, of the same weights and tokens
        }

    def sample(self) -> Batch:
        """Draw prompts and sample a group of answers to each: to all, or to those of this rank."""
        settings = self.settings
        drawn = [task.draw_prompt(self.draws, settings) for _ in range(settings.prompts * self.parts)]
        prompts = [prompt for prompt in drawn for _ in range(settings.samples_per_prompt)]
        generator = torch.Generator(self.device).manual_seed(self.draws.getrandbits(63))
        mine = slice(None) if self.group is None else self._part(len(prompts), group_rank(self.group))
        return sample(self.loaded(self.sampler), prompts, self.sampler.way, settings, generator, mine)

    def _part(self, rows: int, part: int) -> slice:
        return slice(part * rows // self.parts, (part + 1) * rows // self.parts)

    @torch.no_grad()
    def loaded(self, each: Numerics) -> Any:
        """Return the policy, or its copy in other numerics with the weights of now."""
        if each == self.own:
            return self.model
        each.way.load(self.copies[each], self.masters)
        return self.copies[each]

    @torch.no_grad()
    def compare(self, each: Numerics, batch: Batch, stride: int | None = None) -> Record:
        """Decode a rollout's tokens again with the weights of now, and compare with one training pass over all of them.

        With a stride, only the first of so many sequences is decoded, and alone.
        """
        model, rows = self.loaded(each), slice(None, None, stride)
        starts = range(0, len(batch.answers), stride or len(batch.answers))
        parts = [batch.rows(slice(row, row + 1) if stride else rows) for row in starts]
        decoded = torch.cat([decoded_logps(model, part, each.way, self.settings) for part in parts])
        mask = batch.mask[rows]
        return gap(decoded[mask], training_logps(model, batch, each.way)[rows][mask])

    @torch.no_grad()
    def scored(self, batch: Batch) -> Batch:
        """Return a rollout with its rewards, and what its loss is given besides."""
        self.answers = [(*pair, task.reward(*pair)) for pair in batch.answers]
        rewards = torch.tensor([reward for _, _, reward in self.answers], device=self.device)
        reference = None if self.reference is None else training_logps(self.reference, batch, self.way)
        return batch._replace(rewards=rewards, old=batch.logps, reference=reference)

    def _learned(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """Take the steps on a batch; return log-probabilities of the first pass and the last."""
        tokens, parts = None, [batch]
        if self.group is not None:
            tokens = all_gather(batch.mask.sum()[None], self.group).sum()
        elif self.parts > 1:
            tokens = batch.mask.sum()
            parts = [batch.rows(self._part(len(batch.answers), part)) for part in range(self.parts)]
        passes = []
        for _ in range(self.settings.epochs):
            found = []
            for part in parts:
                current = training_logps(self.model, part, self.way)
                self.way.loss(current, part, self.settings, tokens).backward()
                found.append(current.detach())
            passes.append(torch.cat(found))
            self.update(rate)
        return passes[0], passes[-1]

    def update(self, rate: float) -> None:
        """Take the gradients of the weights, those of all ranks added, clip their common norm to 1, and step."""
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            # In the order in which one process adds them to .grad.
            grad = weight.grad if self.group is None else all_reduce(weight.grad, self.group, order="chain")
            master.grad, weight.grad = grad.float(), None
        if self.clips:
            nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            self.way.load(self.model, self.masters)
        self.optimizer.zero_grad()

    def _done(self, each: Numerics, step: int, work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Return what some work gives, and its seconds; note the backends that it chose in the first step.

        In later steps launch plans are kept between calls, but not while the choices are recorded.
        """
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        with ExitStack() as stack:
            choices = stack.enter_context(record_dispatch()) if step == 1 else []
            found = work(*arguments)
        wait()
        seconds = time.perf_counter() - start
        if step == 1:
            self.backends.setdefault(each.name, {}).update({choice.operator: choice.backend for choice in choices})
        return found, seconds
