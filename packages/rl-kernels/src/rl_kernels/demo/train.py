"""GRPO: sample groups with a cache, score them, take a few clipped steps on each padded batch; measurements."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl_kernels.core import record_dispatch
from rl_kernels.core.distributed import all_gather, all_reduce, group_rank
from rl_kernels.core.testing import bits_of
from rl_kernels.demo import task
from rl_kernels.demo.model import make
from rl_kernels.demo.ways import Batch, Ours, Stock, decoded_logps, sample, training_logps
from rl_kernels.grpo_loss import group_advantages

Record = dict[str, Any]  # a step, a gap or a comparison, as run.json has it


def gap(rollout: Tensor, training: Tensor) -> Record:
    """Return the differences of FP32 log-probabilities ``[N]`` of a rollout and of training with the same weights."""
    log_ratio = training.double() - rollout.double()
    return {
        "tokens": len(rollout),
        "mismatches": int((bits_of(rollout) != bits_of(training)).sum()),  # tokens that differ in any bit
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
        way: type[Stock] = Ours,
        device: str = "cpu",
        *,
        watched: Sequence[Stock] = (),  # whose gap is measured every few steps; they change nothing
        rollout: Stock | None = None,  # of a copy that samples in the policy's place
        # Cuts the policy over ranks. Gradients are then not clipped: their norm would need an exchange of its own.
        cut: Callable[[Any], None] | None = None,
        parts: int = 1,  # micro-batches of a step
        group: ProcessGroup | None = None,  # ranks that run one micro-batch each; None runs all here, one by one
    ) -> None:
        self.settings, self.own, self.device = settings, way(settings.dtype), torch.device(device)
        self.parts, self.group, self.draws = parts, group, random.Random(settings.seed)
        self.watched, self.sampler, self.clips = watched, rollout or self.own, cut is None
        self.models = {each: make(settings, self.device, each.dtype) for each in {self.own, self.sampler, *watched}}
        self.model = self.models[self.own]
        if cut is not None:
            cut(self.model)
        for numerics, model in self.models.items():
            numerics.take(model)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if settings.beta else None
        # BF16 is too coarse for small updates: AdamW takes its steps on FP32 copies of the weights.
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.model.parameters()]
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
        self.backends: dict[str, dict[str, str]] = {}  # numerics -> operator -> the backend that ran it
        self.answers: list[tuple[str, str, float]] = []  # prompt, answer and reward of all that the last step sampled

    def step(self, step: int) -> Record:
        """Sample a batch, and learn from it; the gap is between its rollout and the first training pass."""
        batch, rollout_seconds = self._timed(step, self.own, self.sample)
        batch, score_seconds = self._timed(step, self.own, self.scored, batch)
        watched = self.watched if (step - 1) % self.settings.measure_every == 0 else ()
        gaps = {each.name: self._timed(step, each, self.compare, each, batch)[0] for each in watched}
        (first, last), update_seconds = self._timed(step, self.own, self._learn, batch, self.settings.rate(step))
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
            "watched": gaps,  # the gap in other numerics, of the same weights and tokens
        }

    def _timed(self, step: int, numerics: Stock, part: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Run and time a part of a step; note the backends that it chooses: all in the first, then only new ones."""
        synchronize = torch.get_device_module(self.device).synchronize
        synchronize()
        start = time.perf_counter()
        # Launch plans are not kept between calls while every call is recorded.
        with record_dispatch(every_call=step == 1) as choices:
            result = part(*arguments)
        synchronize()
        seconds = time.perf_counter() - start
        self.backends.setdefault(numerics.name, {}).update({choice.operator: choice.backend for choice in choices})
        return result, seconds

    def sample(self) -> Batch:
        """Draw prompts and sample a group of answers to each prompt, or to each prompt of this rank."""
        settings = self.settings
        drawn = [task.draw_prompt(self.draws, settings) for _ in range(settings.prompts * self.parts)]
        prompts = [prompt for prompt in drawn for _ in range(settings.samples_per_prompt)]
        generator = torch.Generator(self.device).manual_seed(self.draws.getrandbits(63))
        size = settings.prompts * settings.samples_per_prompt
        mine = slice(None) if self.group is None else slice(first := group_rank(self.group) * size, first + size)
        return sample(self.loaded(self.sampler), prompts, self.sampler, settings, generator, mine)

    @torch.no_grad()
    def loaded(self, numerics: Stock) -> Any:
        """Return the policy in these numerics, with the current weights."""
        numerics.load(self.models[numerics], self.masters)
        return self.models[numerics]

    @torch.no_grad()
    def compare(self, numerics: Stock, batch: Batch, stride: int | None = None) -> Record:
        """Decode a rollout again, or with a stride some rows, each alone; compare with one training pass over all."""
        model, rows = self.loaded(numerics), slice(None, None, stride)
        parts = [slice(row, row + 1) for row in range(0, len(batch.answers), stride)] if stride else [rows]
        decoded = torch.cat([decoded_logps(model, batch.rows(part), numerics, self.settings) for part in parts])
        mask = batch.mask[rows]
        return gap(decoded[mask], training_logps(model, batch, numerics)[rows][mask])

    @torch.no_grad()
    def scored(self, batch: Batch) -> Batch:
        """Return a rollout with its rewards, and the other log-probabilities that its loss reads."""
        self.answers = [(*pair, task.reward(*pair)) for pair in batch.answers]
        rewards = torch.tensor([reward for _, _, reward in self.answers], device=self.device)
        reference = None if self.reference is None else training_logps(self.reference, batch, self.own)
        return batch._replace(rewards=rewards, old=batch.logps, reference=reference)

    def _learn(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """Take the steps on a batch; return log-probabilities of the first pass and the last."""
        size, tokens, passes = self.settings.prompts * self.settings.samples_per_prompt, None, []
        parts = [batch.rows(slice(first, first + size)) for first in range(0, len(batch.answers), size)]
        if self.parts > 1:
            tokens = batch.mask.sum()[None]
            tokens = (tokens if self.group is None else all_gather(tokens, self.group)).sum()
        for _ in range(self.settings.epochs):
            logps = []
            for part in parts:
                logps.append(training_logps(self.model, part, self.own))
                self.own.loss(logps[-1], part, self.settings, tokens).backward()
            passes.append(torch.cat(logps).detach())
            self.update(rate)
        return passes[0], passes[-1]

    def update(self, rate: float) -> None:
        """Take the gradients of the weights, added over all ranks, clip their common norm to 1, and step."""
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            # In the order in which one process adds them to .grad.
            grad = weight.grad if self.group is None else all_reduce(weight.grad, self.group, order="chain")
            master.grad, weight.grad = grad.float(), None
        if self.clips:
            nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.loaded(self.own)
        self.optimizer.zero_grad()
