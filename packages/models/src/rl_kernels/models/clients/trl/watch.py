"""The first training pass of a batch: a warning and metrics if its log-probs have other bits than the rollout's."""

from __future__ import annotations

import warnings
from typing import Any

import torch

DIFFERENCES = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
"""TRL's names of the distance between log-probs of the rollout and of training."""


class Watch:
    """Knows which training passes have the weights that sampled, and compares the first of these that differs.

    It waits for the GPU once a micro-batch, as the metrics do.

    Args:
        trainer: GRPOTrainer. What it logs under ``DIFFERENCES`` for vLLM is dropped: it compares old log-probs, which
            may be the rollout's own. ``metrics.log`` logs those of the first training pass.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._is_over = trainer, False
        self._steps: dict[str, int] = {}
        """Mode -> optimizer steps before its last rollout."""
        produce = trainer._generate_and_score_completions

        def produced(*args: Any, **options: Any) -> Any:
            mode = self._mode
            self._steps[mode] = trainer.state.global_step
            batch = produce(*args, **options)
            if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
                for name in DIFFERENCES:
                    trainer._metrics[mode][name].pop()
            return batch

        trainer._generate_and_score_completions = produced

    @property
    def _mode(self) -> str:
        return "train" if self._trainer.model.training else "eval"

    def first(self, logps: torch.Tensor) -> torch.Tensor | None:
        """Return the log-probs of a training pass, or None if the weights have changed since the rollout."""
        return logps if self._trainer.state.global_step == self._steps.get(self._mode) else None

    @torch.no_grad()
    def compare(self, first: torch.Tensor | None, sampled: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Warn if log-probs ``[B, T]`` that count differ from those that were sampled; None: there are none."""
        if self._is_over or first is None or sampled is None:
            return
        differ = (first != sampled) & mask
        count = int(differ.sum())
        if count:
            self._is_over = True
            furthest = float((first - sampled).abs()[differ].max())
            warnings.warn(
                f"rl_kernels: {count} of {int(mask.sum())} tokens of a batch have other log-probs in training than in "
                f"the rollout, by up to {furthest:.2g}, although the trainer's model is invariant; for the causes see "
                "docs/troubleshooting.md",
                stacklevel=2,
            )
