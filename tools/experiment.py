"""What a mismatch between rollout and training does to GRPO on a real model: `python tools/experiment.py NAME.jsonl`.

SmolLM2-135M-Instruct, or a small mixture of experts trained from nothing, learns chains of sums, sorting and counting;
the reward is the share of numbers that are right. Arms: `stock` is transformers as it comes, `aligned` runs under
`invariant`, and `fp8` is stock with a sampler whose weights are rounded to FP8 (e4m3, a scale for each output channel).
`--stale K` trains on rollouts that were sampled K updates ago, the first K updates on those of the first weights.
`--loss` uses the recorded log-probs so:

- `clip`: old log-probs of the ratio, which is clipped (PPO, arXiv 1707.06347).
- `plain`: the same without clipping: plain importance sampling.
- `tis`: the old log-probs are computed again by a pass of training when sampled, and the term is multiplied by
  min(old / recorded, 2): truncated importance sampling.

This is a loop of its own, not TRL's: its `steps_per_generation` trains on one rollout several times, so that the
staleness changes from update to update and is 0 in the first of each; here it is K from update K + 1 on.

What is trained are FP32 factors of rank R of all layers' weights (LoRA, merged), so a checkpoint is small: factors and
their two moments (7 MB for SmolLM2 at rank 2), and the K batches that wait. Weights are computed again from the model's
file and the factors; those of a mixture by repeating the supervised warm-up, which runs under `invariant` and so gives
the same bits. Prompts and draws depend on seed and step alone, so no generator has a state. A run that finds its
checkpoint, NAME.pt, goes on from there.

The log has the settings in its first line, then a line for each step. `sampler` compares the recorded log-probs with a
pass of training with the weights that sampled; `update` with the pass of training that the update takes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from experiment_policy import ARMS, MODELS, Factors, computing, load, rollout, round_weights, score, scored
from experiment_tasks import Task, draw, reward

from rl_kernels.core.command import Parser, count, number, writable
from rl_kernels.grpo_loss import Extras, Normalizer, Objective, group_advantages, grpo_loss_from_advantages
from rl_kernels.lab.bench.environment import environment
from rl_kernels.models import MasterWeights
from rl_kernels.models.checkpoints import SMOLLM2
from rl_kernels.models.rollouts.counts import mismatch

FILL = 0
"""Ends a document; it stands before shorter prompts, so that all have one length, and is seen."""
LOSSES = {
    "clip": Objective(),
    "plain": Objective(clip_low=1.0, clip_high=1e9),
    "tis": Objective(rollout_mode="truncate", rollout_max=2.0),
}
UNNAMED = ("log", "steps", "seconds", "save_every")
"""Arguments that a run may change when it goes on."""
PACKAGES = ("transformers", "rl-kernels-models")


class Batch(NamedTuple):
    """Rollouts that wait for their update; log-probs ``[B, N]`` are the sampler's and those of a pass of training."""

    ids: torch.Tensor
    recorded: torch.Tensor
    computed: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor
    sampler: dict[str, Any]


class Run:
    """An arm's model and optimizer, and the rollouts that wait."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.arm, self.device = args, ARMS[args.arm], torch.device(args.device)
        self.model, self.tokenizer = load(args.model, args.seed, self.device)
        lengths = (len(self._prompt(draw(random.Random(index)))) for index in range(1000))
        self.length = max(lengths)
        if args.model != SMOLLM2:
            self._warm_up()
        self.factors = Factors(self.model, args.rank, args.seed)
        self.optimizer = torch.optim.AdamW(self.factors.factors, lr=args.rate, weight_decay=0.0)
        self.sampler = copy.deepcopy(self.model).requires_grad_(False) if self.arm.rounded else self.model
        self.step, self.waiting = 0, list[Batch]()

    def advance(self) -> dict[str, Any]:
        """Sample until there is a rollout of ``stale`` updates ago, train on it, and return the step's record."""
        start = time.perf_counter()
        while len(self.waiting) <= self.args.stale:
            self.waiting.append(self.sample(self.step + len(self.waiting)))
        sampled = time.perf_counter()
        batch = self.waiting.pop(0)
        norm, update = self.update(batch)
        self.step += 1
        return {
            **{"step": self.step, "reward": fmean(batch.rewards.tolist()), "grad_norm": norm},
            **{"solved": fmean((batch.rewards == 1).tolist()), "sampler": batch.sampler, "update": update},
            **{"seconds": time.perf_counter() - start, "rollout_seconds": sampled - start},
        }

    def sample(self, step: int) -> Batch:
        """Return the rollouts of a step, sampled with the weights as they are, on the CPU."""
        args = self.args
        seed = (args.seed << 32) + step + 1
        tasks = self._tasks(random.Random(seed), args.prompts)
        tasks = [task for task in tasks for _ in range(args.samples)]
        prompts = torch.tensor([self._filled(task) for task in tasks], device=self.device)
        uniform = torch.rand(len(tasks), args.tokens, generator=torch.Generator().manual_seed(seed))
        if self.arm.rounded:
            round_weights(self.sampler, self.model)
        found = rollout(self.sampler, self.arm, prompts, uniform.to(self.device))
        new = found.ids[:, self.length :]
        is_end = (new == self.tokenizer.eos_token_id).long()
        mask = is_end.cumsum(1) - is_end == 0
        rows = zip(tasks, new.tolist(), mask.sum(1).tolist(), strict=True)
        rewards = torch.tensor([reward(task, self.tokenizer.decode(ids[:stop])) for task, ids, stop in rows])
        computed, experts = scored(self.model, self.arm, found.ids, args.tokens, args.rows)
        both = None if experts is None or found.experts is None else (found.experts[mask], experts[mask])
        counts = counted(found.logps[mask], computed[mask], both)
        kept = (found.ids, found.logps, computed, mask, rewards)
        return Batch(*(value.cpu() for value in kept), counts)

    def update(self, batch: Batch) -> tuple[float, dict[str, Any]]:
        """Take a step of the optimizer; return the norm of the gradient, and how far the policy is from the sampler."""
        args, logps = self.args, []
        advantages = group_advantages(batch.rewards, samples_per_prompt=args.samples)
        normalizer = Normalizer(num_tokens=batch.mask.sum().to(self.device))
        every = (batch.ids, batch.recorded, batch.computed, batch.mask, advantages)
        for parts in zip(*(value.split(args.rows) for value in every), strict=True):
            ids, recorded, computed, mask, each = (value.to(self.device) for value in parts)
            now = score(self.model, self.arm, ids, args.tokens)
            old, extras = recorded, None
            if args.loss == "tis":
                old, extras = computed, Extras(rollout_ratio=(computed - recorded).exp())
            options = {"objective": LOSSES[args.loss], "extras": extras, "normalizer": normalizer}
            grpo_loss_from_advantages(now, old, None, each, mask, **options).loss.backward()
            logps.append(now.detach()[mask].cpu())
        self.factors.take_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.factors.factors, 1.0)
        self.optimizer.step()
        self.factors.merge()
        return float(norm), counted(batch.recorded[batch.mask], torch.cat(logps))

    def save(self, path: Path) -> None:
        """Write all that the next step depends on, at once."""
        state = {
            **{"settings": settings(self.args), "step": self.step, "optimizer": self.optimizer.state_dict()},
            **{"factors": [factor.detach().cpu() for factor in self.factors.factors]},
            **{"waiting": [tuple(batch) for batch in self.waiting]},
        }
        temporary = path.with_suffix(".new")
        torch.save(state, temporary)
        os.replace(temporary, path)

    @torch.no_grad()
    def resume(self, path: Path) -> None:
        """Read what ``save`` wrote; ``ValueError`` if other settings wrote it."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["settings"] != settings(self.args):
            raise ValueError(f"{path}: was written with other settings: {state['settings']}")
        for factor, value in zip(self.factors.factors, state["factors"], strict=True):
            factor.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.factors.merge()
        self.step, self.waiting = state["step"], [Batch(*values) for values in state["waiting"]]

    def _warm_up(self) -> None:
        """Teach a model with random weights the form of the answers, under ``invariant`` in all arms."""
        args, source = self.args, random.Random(self.args.seed)
        self.model.float().requires_grad_(True)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        MasterWeights(self.model).update_by(optimizer)
        aligned = ARMS["aligned"]
        with computing([self.model], aligned):
            for _ in range(args.warm_up):
                tasks = self._tasks(source, args.prompts * 4)
                answers = [[*map(ord, " ".join(map(str, task.answer))), FILL][: args.tokens] for task in tasks]
                rows = [
                    self._filled(t) + a + [-1] * (args.tokens - len(a)) for t, a in zip(tasks, answers, strict=True)
                ]
                ids = torch.tensor(rows, device=self.device)
                mask = ids[:, self.length :] >= 0
                logps = score(self.model, aligned, ids.clamp(min=FILL), args.tokens)
                (-logps[mask].mean()).backward()
                optimizer.step()
        self.model.requires_grad_(False)

    def _tasks(self, source: random.Random, size: int) -> list[Task]:
        tasks: list[Task] = []
        while len(tasks) < size:
            task = draw(source)
            if len(self._prompt(task)) <= self.length:
                tasks.append(task)
        return tasks

    def _prompt(self, task: Task) -> list[int]:
        return self.tokenizer.prompt(task.question)

    def _filled(self, task: Task) -> list[int]:
        ids = self._prompt(task)
        return [FILL] * (self.length - len(ids)) + ids


def counted(*tensors: Any) -> dict[str, Any]:
    """Return what ``mismatch`` counts, without the distances that a log of each step has no room for."""
    return {name: value for name, value in asdict(mismatch(*tensors)).items() if name not in ("beyond", "k1")}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that the numbers of a run depend on."""
    return {name: value for name, value in vars(args).items() if name not in UNNAMED}


def run(args: argparse.Namespace, tell: Callable[[str], None] = print) -> Run:
    """Train an arm from its checkpoint or from the start, and write its log and checkpoint."""
    start, state = time.perf_counter(), args.log.with_suffix(".pt")
    training = Run(args)
    lines = [json.dumps({"settings": settings(args), "environment": environment(training.device, PACKAGES)})]
    if state.exists():
        training.resume(state)
        # Steps after the checkpoint are taken again.
        lines = args.log.read_text(encoding="utf-8").splitlines()[: training.step + 1]
    saved = training.step
    models = [training.model, training.sampler] if training.arm.rounded else [training.model]
    with args.log.open("w", encoding="utf-8") as log, computing(models, training.arm):
        print(*lines, sep="\n", file=log, flush=True)
        while training.step < args.steps and (not args.seconds or time.perf_counter() - start < args.seconds):
            record = training.advance()
            print(json.dumps(record), file=log, flush=True)
            if record["step"] % 10 == 1:
                shown = f"reward {record['reward']:.3f}, KL {record['sampler']['k3']:.1e}, {record['seconds']:.2f} s"
                tell(f"{args.log.stem}, step {record['step']}: {shown}")
            if training.step - saved >= args.save_every:
                training.save(state)
                saved = training.step
    training.save(state)
    return training


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = Parser("experiment.py", __doc__.splitlines()[0])
    parser.add_argument("log", type=writable, help="NAME.jsonl; its checkpoint is NAME.pt")
    parser.add_argument("--model", choices=MODELS, default=SMOLLM2, help="(%(default)s)")
    parser.add_argument("--arm", choices=ARMS, default="stock", help="(%(default)s)")
    parser.add_argument("--loss", choices=LOSSES, default="clip", help="(%(default)s)")
    parser.add_argument("--stale", type=count(0), default=0, help="updates between sampling and training (%(default)s)")
    sizes = {"steps": 100, "prompts": 64, "tokens": 64, "rank": 2, "rows": 64, "warm-up": 300}
    for name, size in {**sizes, "save-every": 20}.items():
        parser.add_argument(f"--{name}", type=count(1), default=size, help="(%(default)s)")
    parser.add_argument("--samples", type=count(2), default=8, help="of each prompt (%(default)s)")
    parser.add_argument("--rate", type=number(above=0), default=1e-3, help="learning rate of the factors (%(default)s)")
    parser.add_argument("--seed", type=count(0), default=0, help="(%(default)s)")
    parser.add_argument("--seconds", type=count(0), default=0, help="stop and save after so long; 0: no limit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.log.suffix != ".jsonl":
        parser.error(f"log: expected a name that ends in .jsonl, got {args.log.name!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: this PyTorch sees no GPU")
    return args


if __name__ == "__main__":
    run(arguments(None))
    sys.exit(0)
