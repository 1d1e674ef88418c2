"""What a run on a GPU is made of: the training, and the sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The task and the training; ``epochs`` are the optimiser's steps on one batch.

    One step of ``fp32_every`` also compares rollout and training of an FP32 copy of the model.

    The learning rate suits the default width; that of a narrower model is the larger in proportion.

    Raises:
        ValueError: the prompts cannot be drawn: their digits are all different.
    """

    steps: int = 200
    seed: int = 0
    prompts: int = 64
    samples_per_prompt: int = 16
    shortest: int = 4
    longest: int = 8
    epochs: int = 2
    learning_rate: float = 1.5e-4
    warmup_steps: int = 20
    clip_eps: float = 0.2
    fp32_every: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 10:
            found = f"shortest {self.shortest} and longest {self.longest}"
            raise ValueError(f"shortest, longest: expected 1 <= shortest <= longest <= 10 digits, got {found}")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the Llama; by default 104 million parameters."""

    width: int = 768
    feed_forward: int = 3072
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
