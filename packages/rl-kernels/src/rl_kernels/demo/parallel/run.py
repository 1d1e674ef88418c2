"""``--parallel``: train over ranks, then in one process, and compare the weights bit by bit."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from torch import distributed

from rl_kernels.core.distributed import agree, all_gather, group_of, group_rank, group_size
from rl_kernels.demo.measures import Gap
from rl_kernels.demo.parallel.trainers import RankTrainer, parts_of
from rl_kernels.demo.train import Settings

STEPS = 30
"""Steps by default: every step is run twice."""
NAMES = {"tp": "tensor parallelism", "dp": "data parallelism"}
RANKS = {"tp": (1, 2, 4), "dp": (1, 2, 4, 8)}
"""Numbers of ranks that the model's four heads, and the operators, can be shared by."""


def why_not(way: str) -> str | None:
    """Say why these ranks, or none, cannot train, or return None."""
    ranks = os.environ.get("WORLD_SIZE")
    if ranks is None:
        return "start it with torchrun --nproc-per-node 2 -m rl_kernels.demo --parallel ..."
    if int(ranks) not in RANKS[way]:
        return f"expected one of {', '.join(map(str, RANKS[way]))} ranks with {way}, got {ranks}"
    return None


def run(settings: Settings, way: str, quiet: bool) -> bool:
    """Train over the ranks that ``torchrun`` started; return whether no bit differs, on each rank alike."""
    distributed.init_process_group("gloo")
    try:
        return _compared(settings, way, quiet)
    finally:
        distributed.destroy_process_group()


def _compared(settings: Settings, way: str, quiet: bool) -> bool:
    group = group_of(distributed.group.WORLD)
    agree("rl-kernels demo", group, None, {"settings": settings, "parallel": way})
    start, parts = time.perf_counter(), parts_of(way, group)
    if way == "dp":
        settings = replace(settings, prompts=max(1, settings.prompts // parts))
    trainer = RankTrainer(settings, way, parts, group)
    console = Console(quiet=quiet or group_rank(group) > 0)
    console.print(f"GRPO over {group_size(group)} ranks, {NAMES[way]}, gloo; then the same in one process.")
    rewards, gaps = _trained(trainer, settings.steps, console, "over ranks")
    weights = trainer.weights()
    differing = torch.zeros(1, dtype=torch.int64)
    # One process is enough for the comparison; the others wait.
    if group_rank(group) == 0:
        alone = RankTrainer(settings, way, parts, None)
        _trained(alone, settings.steps, console, "one process")
        differing += sum(_differing(weights[name], value) for name, value in alone.weights().items())
    compared = torch.tensor([sum(each.tokens for each in gaps), sum(each.mismatches for each in gaps)])
    # Under tensor parallelism all ranks score the same tokens.
    tokens, mismatches = all_gather(compared[None], group)[: None if way == "dp" else 1].sum(0).tolist()
    differing = all_gather(differing, group).sum()
    size = sum(value.numel() for value in weights.values())
    verdict = Console(quiet=group_rank(group) > 0)
    verdict.print(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last of {len(rewards)}")
    verdict.print(f"log-probs of rollout and training: {mismatches} of {tokens:,} differ in any bit")
    verdict.print(f"weights over ranks and in one process: {int(differing)} of {size:,} differ in any bit")
    verdict.print(f"{time.perf_counter() - start:.0f} s")
    return mismatches == 0 and int(differing) == 0


def _trained(trainer: RankTrainer, steps: int, console: Console, name: str) -> tuple[list[float], list[Gap]]:
    rewards, gaps = [], []
    numbers = range(1, steps + 1)
    for step in track(numbers, name, console=console, transient=True, disable=console.quiet):
        reward, found = trainer.step(step)
        rewards.append(reward)
        gaps += found
    return rewards, gaps


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())
