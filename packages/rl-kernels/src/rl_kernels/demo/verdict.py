"""Whether a run showed what the demo is for: the reward has risen, and not one bit differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

MARGIN = 0.5
"""By how much the mean reward, which lies between 0 and 1, must have risen."""


class Compared(Protocol):
    """Tokens whose log-probabilities were computed twice, and how many differed in any bit."""

    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def mismatches(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Verdict:
    """Mean reward of the first and the last tenth of the steps; tokens compared through the operators."""

    first_reward: float
    last_reward: float
    compared: int
    mismatches: int

    @property
    def risen(self) -> bool:
        """Whether the reward has risen by the margin."""
        return self.last_reward >= self.first_reward + MARGIN

    @property
    def passed(self) -> bool:
        """Whether the reward has risen and no bit differed."""
        return self.risen and self.mismatches == 0

    def record(self) -> dict[str, Any]:
        """Return it as a part of a run's JSON."""
        return {**asdict(self), "risen": self.risen, "passed": self.passed}


def judge(rewards: Sequence[float], compared: Sequence[Compared]) -> Verdict:
    """Judge a run by the mean rewards of its steps, and by all comparisons through the operators."""
    window = max(1, len(rewards) // 10)
    return Verdict(
        first_reward=sum(rewards[:window]) / window,
        last_reward=sum(rewards[-window:]) / window,
        compared=sum(part.tokens for part in compared),
        mismatches=sum(part.mismatches for part in compared),
    )
