"""The task: put the digits of a number in ascending order. A program can check every answer.

The prompt ``4192=`` asks for ``1249``. Half of the reward is for the right digits, whatever their order, the other
half for what stands in its right place; an answer that is too long or too short loses of both, and only the solution
earns 1.
"""

from __future__ import annotations

import random
from collections import Counter

SHORTEST, LONGEST = 2, 4
PROMPT_TOKENS = LONGEST + 1
"""Tokens of the longest prompt: its digits and the equals sign."""
ANSWER_TOKENS = LONGEST + 1
"""Tokens that an answer may take: the longest solution, and its end."""


def draw_prompt(source: random.Random, shortest: int = SHORTEST, longest: int = LONGEST) -> str:
    """Return a prompt: ``shortest`` to ``longest`` different digits, of which there are ten, and an equals sign."""
    return "".join(source.sample("0123456789", source.randint(shortest, longest))) + "="


def solution(prompt: str) -> str:
    """Return the one right answer to a prompt."""
    return "".join(sorted(prompt.removesuffix("=")))


def reward(prompt: str, answer: str) -> float:
    """Return the reward of an answer, from 0 to 1: the mean of two shares of the longer of answer and solution.

    One is the share of the characters that answer and solution have in common, the other that of the places that agree.
    """
    right = solution(prompt)
    common = (Counter(answer) & Counter(right)).total()
    agreeing = sum(a == b for a, b in zip(answer, right, strict=False))
    return (common + agreeing) / (2 * max(len(answer), len(right)))
