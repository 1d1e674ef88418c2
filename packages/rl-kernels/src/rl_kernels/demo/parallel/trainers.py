"""GRPO over ranks, and the same training in one process, whose weights must have the same bits.

Gradients are not clipped: their norm would need an exchange of its own.
"""

from __future__ import annotations

import copy
import random
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import all_gather, all_reduce, group_rank, group_size
from rl_kernels.demo import task
from rl_kernels.demo.invariant import INVARIANT
from rl_kernels.demo.measures import Gap, gap
from rl_kernels.demo.model import ModelConfig, Policy
from rl_kernels.demo.parallel.policy import cut
from rl_kernels.demo.rollout import Rollout, sample, training_logps
from rl_kernels.demo.schedule import learning_rate
from rl_kernels.demo.train import Settings
from rl_kernels.grpo_loss import Normaliser, grpo_loss
from rl_kernels.models.parallel import full_state_dict

WAYS = ("tp", "dp")
PARTS = 8
"""Most micro-batches of a step: seeds of their draws are this far apart."""


class Micro(NamedTuple):
    """A micro-batch of one step: its rollout, rewards and log-probabilities of the reference."""

    rollout: Rollout
    rewards: torch.Tensor
    reference: torch.Tensor


class RankTrainer:
    """Trains over the ranks of a group, or in one process.

    Args:
        settings: of the run.
        way: ``tp``: each rank has a part of the weights and runs every batch. ``dp``: each has all weights and runs one
            of ``parts`` micro-batches; gradients are added in the order of ranks.
        parts: micro-batches of a step.
        group: the ranks; None runs all micro-batches here, one after the other.
    """

    def __init__(self, settings: Settings, way: str, parts: int, group: ProcessGroup | None) -> None:
        self.settings, self.parts = settings, parts
        self.data_group = group if way == "dp" else None
        self.mine = range(parts) if self.data_group is None else (group_rank(self.data_group),)
        self.draws = random.Random(settings.seed)
        positions = task.PROMPT_TOKENS + task.ANSWER_TOKENS
        policy = Policy(ModelConfig(positions=positions), torch.Generator().manual_seed(settings.seed))
        self.policy = cut(policy, group if way == "tp" else None)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, step: int) -> tuple[float, list[Gap]]:
        """Sample a batch and learn from it; return the mean reward, and how training differs from the rollout."""
        settings = self.settings
        batches = self._batches(step)
        counts = torch.stack([batch.rollout.mask.sum() for batch in batches])
        total = self._gathered(counts).sum()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                step, steps=settings.steps, peak=settings.learning_rate, warmup_steps=settings.warmup_steps
            )
        gaps = []
        for epoch in range(settings.epochs):
            self.optimizer.zero_grad()
            for batch in batches:
                current = self._learn(batch, total)
                if epoch == 0:
                    gaps.append(gap(batch.rollout.logps, current, batch.rollout.mask))
            self._add_gradients()
            self.optimizer.step()
        rewards = torch.stack([batch.rewards.mean() for batch in batches])
        return float(self._gathered(rewards).mean()), gaps

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole weights; all ranks must call it."""
        return full_state_dict(self.policy)

    def _batches(self, step: int) -> list[Micro]:
        settings, found = self.settings, []
        drawn = [task.draw_prompt(self.draws) for _ in range(settings.prompts * self.parts)]
        for part in self.mine:
            mine = drawn[part * settings.prompts : (part + 1) * settings.prompts]
            prompts = [prompt for prompt in mine for _ in range(settings.samples_per_prompt)]
            seed = (settings.seed * settings.steps + step) * PARTS + part
            generator = torch.Generator().manual_seed(seed)
            rollout = sample(self.policy, prompts, INVARIANT, temperature=settings.temperature, generator=generator)
            rewards = torch.tensor([task.reward(*pair) for pair in zip(prompts, rollout.answers, strict=True)])
            with torch.no_grad():
                reference = training_logps(self.reference, rollout, INVARIANT, settings.temperature)
            found.append(Micro(rollout, rewards, reference))
        return found

    def _learn(self, batch: Micro, total: torch.Tensor) -> torch.Tensor:
        """Add the gradient of a micro-batch, whose loss is divided by the tokens of the whole batch."""
        settings = self.settings
        current = training_logps(self.policy, batch.rollout, INVARIANT, settings.temperature)
        output = grpo_loss(
            current,
            batch.rollout.logps,
            batch.reference,
            batch.rewards,
            batch.rollout.mask,
            samples_per_prompt=settings.samples_per_prompt,
            clip_eps=settings.clip_eps,
            beta=settings.beta,
            normaliser=Normaliser(num_tokens=total),
        )
        output.loss.backward()
        return current.detach()

    def _add_gradients(self) -> None:
        if self.data_group is None:
            return
        for parameter in self.policy.parameters():
            assert parameter.grad is not None
            # In the order in which one process adds them to .grad.
            parameter.grad = all_reduce(parameter.grad, self.data_group, order="chain")

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.data_group is None else all_gather(x, self.data_group)


def parts_of(way: str, group: ProcessGroup) -> int:
    """Return the micro-batches of a step: one for each rank under data parallelism."""
    return group_size(group) if way == "dp" else 1
