"""``--parallel``: train over ranks, then in one process, and compare the weights bit by bit."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch
from rich.progress import track
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import agree, all_gather, group_of, group_rank, group_size
from rl_kernels.demo.model import Policy
from rl_kernels.demo.task import Settings
from rl_kernels.demo.train import Record, Trainer, different
from rl_kernels.models.parallel import ColumnParallel, RowParallel, full_state_dict
from rl_kernels.models.parallel.ranks import Ranks

STEPS = 30
"""Steps by default: every step is run twice."""
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


def trained(
    settings: Settings, way: str, parts: int, group: ProcessGroup | None, shows: bool
) -> tuple[list[Record], dict[str, torch.Tensor]]:
    """Train over a group, or the same in one process; return all steps, and the whole weights, on each rank.

    ``tp``: each rank has a part of the weights and runs every batch. ``dp``: each has all weights and runs one of
    ``parts`` micro-batches; gradients are added in the order of ranks.
    """

    def cut(policy: Policy) -> None:
        """Cut attention by heads, other layers by columns and rows; without a group of ranks, only their sums."""
        # Four segments of a sum: the narrowest layer has 64 inputs, 16 for each.
        ranks = Ranks(group if way == "tp" else None, 4, cuts_tokens=False)
        blocks: Any = policy.blocks
        for block in blocks:
            for layer in (block.qkv, block.up):
                ColumnParallel(ranks).apply(layer)
            for layer in (block.mix, block.down):
                RowParallel(ranks).apply(layer)

    trainer = Trainer(settings, cut=cut, parts=parts, group=group if way == "dp" else None)
    name = "one process" if group is None else "over ranks"
    numbers = track(range(1, settings.steps + 1), name, transient=True, disable=not shows)
    return [trainer.step(step) for step in numbers], full_state_dict(trainer.model)


def run(settings: Settings, way: str) -> bool:
    """Train over the ranks that ``torchrun`` started; return whether no bit differs, on each rank alike."""
    distributed.init_process_group("gloo")
    group: Any = group_of(distributed.group.WORLD)
    agree("rl-kernels demo", group, None, {"settings": settings, "parallel": way})
    start, size, is_first = time.perf_counter(), group_size(group), group_rank(group) == 0
    parts = size if way == "dp" else 1
    settings = replace(settings, prompts=max(1, settings.prompts // parts))
    history, weights = trained(settings, way, parts, group, is_first)
    total = sum(value.numel() for value in weights.values())
    # One process is enough for the comparison; the others wait.
    alone = trained(settings, way, parts, None, True)[1] if is_first else weights
    differing = sum(int(different(value, alone[name]).sum()) for name, value in weights.items())
    counts = [sum(each["tokens"] for each in history), sum(each["mismatches"] for each in history), differing]
    gathered = all_gather(torch.tensor([counts]), group)
    # Under tensor parallelism all ranks score the same tokens.
    (tokens, mismatches, _), differing = gathered[:parts].sum(0).tolist(), int(gathered[0, 2])
    if is_first:
        rewards = (
            f"{history[0]['reward']:.3f} in the first step, {history[-1]['reward']:.3f} in the last of {len(history)}"
        )
        print(f"GRPO over {size} ranks, {way}, gloo, and the same in one process\nreward: {rewards}")
        print(f"log-probs of rollout and training: {mismatches} of {tokens:,} differ in any bit")
        print(f"weights over ranks and in one process: {differing} of {total:,} differ in any bit")
        print(f"{time.perf_counter() - start:.0f} s")
    distributed.destroy_process_group()
    return mismatches == 0 and differing == 0
