"""Old log-probabilities from the rollout: with the same bits on both sides, TRL's own pass for them is skipped."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from rl_kernels.models.clients.trl.rollout import Sampled


def take_from_rollout(trainer: Any) -> None:
    """Return recorded log-probabilities where TRL computes old ones from the weights that have just sampled.

    TRL needs old log-probabilities if several optimizer steps are taken on a batch, and for its correction of what vLLM
    samples. It computes them by a pass through the model at the end of the rollout, before the pass of a reference
    model. If tokens come from several turns, or one without a log-probability, TRL's pass runs.

    Args:
        trainer: GRPOTrainer, whose ``_generate_single_turn`` returns log-probabilities with the bits of training.
    """
    every = trainer.args.steps_per_generation * trainer.num_iterations
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if trainer.args.gradient_accumulation_steps % every == 0 and not corrects:
        return
    sample, score = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies
    produce = trainer._generate_and_score_completions
    turns: list[Sampled] = []
    # One entry from the start of a rollout until TRL computes its old log-probabilities.
    awaited: list[bool] = []

    def sampled(self: Any, *args: Any, **options: Any) -> Sampled:
        turns.append(sample(*args, **options))
        return turns[-1]

    def scored(
        self: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, completion_length: int, *args: Any, **options: Any
    ) -> Any:
        if awaited and not torch.is_grad_enabled():
            awaited.clear()
            if len(turns) == 1 and len(turns[0][0]) == len(ids) and all(None not in values for values in turns[0][1]):
                return _padded_logps(turns[0], ids, completion_length), None, None
        return score(model, ids, mask, completion_length, *args, **options)

    def produced(self: Any, *args: Any, **options: Any) -> Any:
        turns.clear()
        awaited[:] = [True]
        try:
            return produce(*args, **options)
        finally:
            awaited.clear()

    trainer._generate_single_turn = MethodType(sampled, trainer)
    trainer._get_per_token_logps_and_entropies = MethodType(scored, trainer)
    trainer._generate_and_score_completions = MethodType(produced, trainer)


def _padded_logps(turn: Sampled, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Return recorded log-probabilities as ``[B, width]``, FP32, 0 after the end of a completion."""
    result = torch.zeros((len(ids), width), dtype=torch.float32, device="cpu")
    for row, values in zip(result, turn[1], strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
    return result.to(ids.device)
