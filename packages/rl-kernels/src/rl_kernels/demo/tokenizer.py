"""A byte-level tokenizer: one token a byte, and one that is no byte."""

from __future__ import annotations

from collections.abc import Iterable

EOS = 256
"""Ends an answer, and fills its row behind it."""
VOCAB = 257


def encode(text: str) -> list[int]:
    """Return the token ids of a text: the bytes of its UTF-8 form."""
    return list(text.encode("utf-8"))


def decode(ids: Iterable[int]) -> str:
    """Return the text of the ids up to the first EOS; bytes that are no UTF-8 come as U+FFFD."""
    content = bytearray()
    for token in ids:
        if token == EOS:
            break
        content.append(token)
    return content.decode("utf-8", errors="replace")
