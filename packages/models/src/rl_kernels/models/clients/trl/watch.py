"""A warning at the first batch whose log-probs have other bits in training than in the rollout."""

from __future__ import annotations

import warnings

import torch


class Watch:
    """Compares the rollout's log-probs with those of the first training pass, until some differ.

    It waits for the GPU once a micro-batch, as the metrics do.
    """

    def __init__(self) -> None:
        self._is_over = False

    @torch.no_grad()
    def compare(self, first: torch.Tensor, sampled: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Warn if log-probs ``[B, T]`` that count differ from those that were sampled; None: nothing was recorded."""
        if self._is_over or sampled is None:
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
