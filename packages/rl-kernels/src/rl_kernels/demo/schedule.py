"""The learning rate of a run."""

from __future__ import annotations


def learning_rate(step: int, *, steps: int, peak: float, warmup_steps: int) -> float:
    """Return the rate of a step, counted from 1: it rises over the first steps, then falls in a line to a tenth."""
    rise = min(1.0, step / warmup_steps)
    return peak * rise * (1 - 0.9 * (step - 1) / steps)
