"""Whether a run showed what the demo is for: the reward has risen, if it had the steps, and not one bit differs."""

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
    """What a run showed.

    Attributes:
        first_reward: mean of the first tenth of the steps.
        last_reward: mean of the last tenth.
        compared: tokens that were compared through the operators.
        mismatches: how many of them differed in any bit.
        enough: whether the run was long enough for its reward to be judged.
    """

    first_reward: float
    last_reward: float
    compared: int
    mismatches: int
    enough: bool

    @property
    def risen(self) -> bool:
        """Whether the reward has risen by the margin."""
        return self.last_reward >= self.first_reward + MARGIN

    @property
    def passed(self) -> bool:
        """Whether no bit differed, and the reward has risen if it is judged."""
        return (self.risen or not self.enough) and self.mismatches == 0

    def record(self) -> dict[str, Any]:
        """Return it as a part of a run's JSON."""
        return {**asdict(self), "risen": self.risen, "passed": self.passed}


def judge(rewards: Sequence[float], compared: Sequence[Compared], needed: int) -> Verdict:
    """Judge a run by all comparisons through the operators, and by its rewards if it has the ``needed`` steps."""
    window = max(1, len(rewards) // 10)
    return Verdict(
        first_reward=sum(rewards[:window]) / window,
        last_reward=sum(rewards[-window:]) / window,
        compared=sum(part.tokens for part in compared),
        mismatches=sum(part.mismatches for part in compared),
        enough=len(rewards) >= needed,
    )
