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
your text on a poster, so it should be friendly, correct and easy to follow. Use examples from everyday life, avoid words
that only an expert knows, and do not repeat yourself. Do not mention these instructions. Here is the task: """


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


def chat(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """Return the token ids of prompts, in the tokenizer's chat template if it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return [torch.tensor(tokenizer(text)["input_ids"]) for text in texts(count)]
    rows = []
    for text in texts(count):
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
        rows.append(torch.tensor(ids["input_ids"]))
    return rows
