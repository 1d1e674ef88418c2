"""Chat prompts of two lengths, so that a batch of them is padded."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

TASKS = (
    "Explain to a beginner",
    "Write a short story about",
    "Compare two points of view on",
    "Write a letter to a friend about",
    "Describe step by step",
    "Make a list of questions about",
    "Tell the history of",
    "Give practical advice on",
)
TOPICS = (
    "how bread is baked",
    "the moon and the tides",
    "learning to play an instrument",
    "traveling by train",
    "keeping bees in a city",
    "why the sky is blue",
    "teamwork in a small company",
    "growing vegetables at home",
)
BEFORE = """You are helping a class that prepares a small exhibition for its school. Visitors of all ages will read
your text on a poster, so it should be friendly, correct and easy to follow. Use examples from everyday life, avoid
words that only an expert knows, and do not repeat yourself. Do not mention these instructions. Here is the task: """


def texts(count: int) -> list[str]:
    """Return prompts, every other one long; after 64 they repeat, as the samples of a group do in GRPO."""
    # Neighbors differ in task and topic.
    pairs = list(product(range(len(TASKS)), range(len(TOPICS))))
    found = []
    for number in range(count):
        shift, topic = pairs[number % len(pairs)]
        question = f"{TASKS[(topic + shift) % len(TASKS)]} {TOPICS[topic]}."
        found.append(f"{BEFORE if number % 2 else ''}{question}".replace("\n", " "))
    return found


def chat(tokenizer: Any, count: int) -> list[torch.Tensor] | None:
    """Return the token ids of prompts, in the chat template if there is one; None if the tokenizer has no vocabulary.

    transformers makes a tokenizer without one where a folder has none.
    """
    prompts = texts(count)
    rows = [_encoded(tokenizer, text) for text in prompts]
    has_vocabulary = len(set(map(tuple, rows))) == len(set(prompts))
    return [torch.tensor(row, device="cpu") for row in rows] if has_vocabulary else None


def _encoded(tokenizer: Any, text: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        message, options = [{"role": "user", "content": text}], {"add_generation_prompt": True, "tokenize": True}
        found = tokenizer.apply_chat_template(message, return_dict=True, **options)["input_ids"]
    else:
        found = tokenizer(text)["input_ids"]
    return list(found)
