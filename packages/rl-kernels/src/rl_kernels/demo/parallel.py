"""``--parallel``: train over ranks, then in one process, and compare the weights bit by bit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from rich.progress import track
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import agree, all_gather, group_of
from rl_kernels.core.testing import bits_of
from rl_kernels.demo.model import Policy
from rl_kernels.demo.task import Settings
from rl_kernels.demo.train import Record, Trainer
from rl_kernels.models.parallel import ColumnParallel, RowParallel, full_state_dict
from rl_kernels.models.parallel.ranks import Ranks

STEPS = 30  # by default: every step is run twice
RANKS = {"tp": (1, 2, 4), "dp": (1, 2, 4, 8)}  # by which the model's four heads, and the operators, can be shared


def trained(settings: Settings, way: str, parts: int, group: ProcessGroup | None) -> tuple[list[Record], Any]:
    """Train over a group, or equally in one process; return all steps, and the whole weights, on each rank.

    ``tp``: each rank has a part of the weights and runs every batch. ``dp``: each has all weights and runs one of
    ``parts`` micro-batches; gradients are added in the order of ranks.
    """

    def cut(policy: Policy) -> None:
        # Attention by heads, other layers by columns and rows; without a group, only the sums, in 4 segments.
        ranks = Ranks(group if way == "tp" else None, 4, cuts_tokens=False)
        for name, layer in policy.blocks.named_modules():
            if isinstance(layer, torch.nn.Linear):
                (ColumnParallel if name.endswith(("qkv", "up")) else RowParallel)(ranks).apply(layer)

    trainer = Trainer(settings, cut=cut, parts=parts, group=group if way == "dp" else None)
    title = "one process" if group is None else "over ranks"
    steps = track(range(1, settings.steps + 1), title, transient=True, disable=distributed.get_rank() > 0)
    return [trainer.step(step) for step in steps], full_state_dict(trainer.model)


def run(settings: Settings, way: str) -> bool:
    """Train over the ranks that ``torchrun`` started; return whether no bit differs, on each rank alike."""
    distributed.init_process_group("gloo")
    start, group = time.perf_counter(), group_of(distributed.group.WORLD)
    agree("rl-kernels demo", group, None, {"settings": settings, "parallel": way})
    size, is_first = group.size(), group.rank() == 0
    parts = size if way == "dp" else 1
    settings = replace(settings, prompts=max(1, settings.prompts // parts))
    history, weights = trained(settings, way, parts, group)
    # One process is enough for the comparison; all other processes wait.
    alone = trained(settings, way, parts, None)[1] if is_first else weights
    differing = sum(int((bits_of(value) != bits_of(alone[name])).sum()) for name, value in weights.items())
    counts = [sum(step[name] for step in history) for name in ("tokens", "mismatches")]
    gathered = all_gather(torch.tensor([[*counts, differing]]), group)
    # Under tensor parallelism all ranks score the same tokens.
    (tokens, mismatches, _), differing = gathered[:parts].sum(0).tolist(), int(gathered[0, 2])
    if is_first:
        print(f"GRPO over {size} ranks, {way}, gloo, and the same in one process")
        first, last = history[0]["reward"], history[-1]["reward"]
        print(f"reward: {first:.3f} in the first step, {last:.3f} in the last of {len(history)}")
        print(f"log-probs of rollout and training: {mismatches} of {tokens:,} differ in any bit")
        total = sum(value.numel() for value in weights.values())
        print(f"weights over ranks and in one process: {differing} of {total:,} differ in any bit")
        print(f"{time.perf_counter() - start:.0f} s")
    distributed.destroy_process_group()
    return mismatches == differing == 0
