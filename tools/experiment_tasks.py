"""Tasks of `experiment.py` whose answers are numbers: chains of sums, sorting, counting. Nothing is downloaded."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A question, and the numbers that answer it."""

    question: str
    answer: tuple[int, ...]


def chain(source: random.Random) -> Task:
    """Return a sum of two to four terms."""
    terms = [source.randint(1, 9)] + [
        source.choice((-1, 1)) * source.randint(1, 9) for _ in range(source.randint(1, 3))
    ]
    text = "".join(f" {'+' if term > 0 else '-'} {abs(term)}" for term in terms).removeprefix(" + ")
    return Task(f"Compute {text}", (sum(terms),))


def sorting(source: random.Random) -> Task:
    """Return three to five numbers to sort."""
    numbers = source.sample(range(100), source.randint(3, 5))
    return Task(f"Sort ascending: {' '.join(map(str, numbers))}", tuple(sorted(numbers)))


def counting(source: random.Random) -> Task:
    """Return a row of letters in which one is counted."""
    letters = source.choices("abc", k=source.randint(4, 9))
    return Task(f"Count the a: {' '.join(letters)}", (letters.count("a"),))


KINDS = chain, sorting, counting


def draw(source: random.Random) -> Task:
    """Return a task of any kind."""
    return source.choice(KINDS)(source)


def reward(task: Task, completion: str) -> float:
    """Return the share of the answer's numbers that the last numbers of a completion give in their places."""
    found = [int(text) for text in re.findall(r"-?\d+", completion)[-len(task.answer) :]]
    if len(found) != len(task.answer):
        return 0.0
    return sum(a == b for a, b in zip(found, task.answer, strict=True)) / len(found)


class Characters:
    """A tokenizer of ASCII characters, for models that are trained from nothing; 0 ends an answer."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 128

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a question."""
        return [ord(character) for character in f"{question}="]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(map(chr, ids))


class Chat:
    """The tokenizer of a chat model: a question becomes a message of a user."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id: int = tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self._tokenizer)

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a chat in which a user asks for the numbers alone."""
        chat = [{"role": "user", "content": f"{question}\nAnswer with numbers only."}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
