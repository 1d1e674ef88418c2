"""What a rollout sampled, scored as training scores it: ``linear_logp`` on the hidden states that tokens came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_kernels.models.clients.trl.head import IGNORED, Head

Sampled = tuple[list[list[int]], list[list[float]]]
"""Tokens of each completion, and the log-probability of each."""


def check_rollout(trainer: Any) -> None:
    """Refuse rollouts whose hidden states are not seen.

    Raises:
        ValueError: tokens are sampled elsewhere than by transformers, or not in a pass each, or from other logits.
    """
    beyond = {
        "use_vllm": trainer.use_vllm,
        "rollout_func": trainer.rollout_func is not None,
        # TRL replaces the forward of the head, whose logits then follow the batch.
        "cast_lm_head_to_fp32": trainer.args.cast_lm_head_to_fp32,
    }
    for name, is_set in beyond.items():
        if is_set:
            raise ValueError(f"{name}: expected a trainer without it, to record what transformers samples")
    if getattr(trainer.generation_config, "prefill_chunk_size", None) is not None:
        raise ValueError("generation_kwargs: expected no prefill_chunk_size, a prompt in one pass")


def recorded(sample: Callable[..., Any], head: Head) -> Callable[..., Sampled]:
    """Return ``GRPOTrainer._generate_single_turn``, by ``generate``, with the log-probability of each sampled token."""

    def sampled(*args: Any, **options: Any) -> Sampled:
        with inputs_of(head.module, lambda hidden: hidden[:, -1].clone()) as rows:
            ids, _ = sample(*args, **options)
        return ids, _logps(head, rows, ids)

    return sampled


@contextmanager
def inputs_of(
    module: nn.Module, kept: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden
) -> Iterator[list[torch.Tensor]]:
    """Collect what is kept of the hidden states that a head is given, one list entry a pass."""
    rows: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: rows.append(kept(args[0])))
    try:
        yield rows
    finally:
        hook.remove()


@torch.no_grad()
def _logps(head: Head, rows: Sequence[torch.Tensor], ids: Sequence[Sequence[int]]) -> list[list[float]]:
    longest = max(map(len, ids))
    if len(rows) < longest:
        raise RuntimeError(f"rollout: expected a pass for each of {longest} tokens, saw {len(rows)}")
    hidden = torch.stack(list(rows[:longest]), 1)
    labels = torch.tensor([[*each, *[IGNORED] * (longest - len(each))] for each in ids], device=hidden.device)
    found = head.scores(hidden, labels).log_probs
    assert found is not None
    return [values[: len(each)] for values, each in zip(found.tolist(), ids, strict=True)]
