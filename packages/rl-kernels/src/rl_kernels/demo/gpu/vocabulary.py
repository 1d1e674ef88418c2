"""Tokens of the task alone, so that a policy with random weights finds answers at once: a digit each, = and the end."""

from __future__ import annotations

from collections.abc import Iterable

CHARACTERS = "0123456789="
END = len(CHARACTERS)
"""Ends an answer, and fills its row behind it."""
VOCAB = END + 1


def encode(text: str) -> list[int]:
    """Return the token ids of a text.

    Raises:
        ValueError: a character has no token.
    """
    return [CHARACTERS.index(character) for character in text]


def decode(ids: Iterable[int]) -> str:
    """Return the text of the ids up to the first end."""
    text = ""
    for token in ids:
        if token == END:
            break
        text += CHARACTERS[token]
    return text
