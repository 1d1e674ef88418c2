"""The task, put the digits of a number in ascending order, and the settings of a run.

The prompt ``4192=`` asks for ``1249``. Half of the reward is for the right digits in any order, half for digits in
their right place. An answer of another length loses of both; only the solution earns 1.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Settings:
    """The settings of a run; the defaults are for a CPU."""

    steps: int = 100
    seed: int = 0
    prompts: int = 16
    samples_per_prompt: int = 16
    shortest: int = 2  # digits of a prompt
    longest: int = 4
    epochs: int = 2  # optimizer steps on one batch
    learning_rate: float = 4e-3
    warmup_steps: int = 10
    clip_eps: float = 0.2
    beta: float = 0.05  # weight of the KL penalty to the initial policy
    measure_every: int = 10  # steps between measurements of the gap in other numerics
    llama: bool = False  # whether the model is a LlamaForCausalLM, else model.Policy
    dtype: str = "FP32"  # of the weights that are trained
    width: int = 64
    feed_forward: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    characters: str = "0123456789="  # the vocabulary: the characters of the task alone, so that answers are found soon

    @property
    def end(self) -> int:
        """The last token, which ends an answer and pads its row."""
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Return the token of each character."""
        return [self.characters.index(character) for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the characters of tokens, without the end token and ids that are no tokens."""
        return "".join(self.characters[token] for token in tokens if 0 <= token < self.end)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1: a linear warm-up, times a linear decay to a tenth."""
        return self.learning_rate * min(1.0, step / self.warmup_steps) * (1 - 0.9 * (step - 1) / self.steps)


CPU = Settings()
GPU = replace(CPU, steps=200, prompts=64, shortest=4, longest=8, learning_rate=1.5e-4, warmup_steps=20, beta=0.0)
# A Llama of 104 million parameters, whose width the learning rate suits.
GPU = replace(GPU, llama=True, dtype="BF16", width=768, feed_forward=3072, layers=12, heads=12)


def draw_prompt(source: random.Random, settings: Settings) -> str:
    """Return a prompt: different digits, and an equals sign."""
    return "".join(source.sample("0123456789", source.randint(settings.shortest, settings.longest))) + "="


def reward(prompt: str, answer: str) -> float:
    """Return the reward of an answer, from 0 to 1."""
    solution = sorted(prompt.removesuffix("="))
    common = (Counter(answer) & Counter(solution)).total()
    in_place = sum(a == b for a, b in zip(answer, solution, strict=False))
    return (common + in_place) / (2 * max(len(answer), len(solution)))
