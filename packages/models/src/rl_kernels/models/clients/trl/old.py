"""Old log-probabilities: the rollout's own where these have the bits of training, so that TRL's pass is skipped."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from rl_kernels.models.clients.trl.kept import Carried, padded, with_kept
from rl_kernels.models.clients.trl.rollout import Sampled


def replace_old_pass(trainer: Any, carried: Carried, *, is_recorded: bool) -> None:
    """Return recorded log-probabilities where TRL computes old ones from the weights that have just sampled.

    TRL needs old log-probabilities if several optimizer steps are taken on a batch, and for its correction of what vLLM
    samples. It computes them by a pass through the model at the end of the rollout, before the pass of a reference
    model. If tokens come from several turns, or one without a log-probability, TRL's pass runs, over the tokens that
    the sampler kept.

    Args:
        trainer: GRPOTrainer.
        carried: has what the sampler kept.
        is_recorded: whether its ``_generate_single_turn`` returns log-probabilities with the bits of training.
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
            completions = ids[:, -completion_length:]
            if len(turns) == 1 and _is_complete(turns[0], len(ids)):
                return padded(turns[0][1], completions, 0.0), None, None
            model = with_kept(model, carried.of(completions))
        return score(model, ids, mask, completion_length, *args, **options)

    def produced(self: Any, *args: Any, **options: Any) -> Any:
        turns.clear()
        awaited[:] = [True]
        try:
            return produce(*args, **options)
        finally:
            awaited.clear()

    if is_recorded:
        trainer._generate_single_turn = MethodType(sampled, trainer)
    trainer._get_per_token_logps_and_entropies = MethodType(scored, trainer)
    trainer._generate_and_score_completions = MethodType(produced, trainer)


def _is_complete(turn: Sampled, count: int) -> bool:
    return len(turn[0]) == count and all(None not in values for values in turn[1])
