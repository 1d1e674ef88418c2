"""The sum of the segments' gradients of hidden: a balanced binary tree that holds few of its terms at once."""

from __future__ import annotations

import torch


class Tree:
    """Adds terms in the order in which they come, by a balanced tree: of four, ``(0 + 1) + (2 + 3)``.

    A term without a sibling is passed up unchanged, as in ``core.distributed.tree_sum``, whose bits these are.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Make a tree for terms with the shape, dtype and device of ``like``, which is the first buffer."""
        self._free = [like]
        self._shape = like
        self._waiting: list[tuple[int, torch.Tensor]] = []

    def buffer(self) -> torch.Tensor:
        """Return an uninitialized buffer for the next term."""
        return self._free.pop() if self._free else torch.empty_like(self._shape)

    def add(self, term: torch.Tensor) -> None:
        """Take the next term, in a buffer of this tree, and add it to its sibling, and their sum to its sibling."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            _, left = self._waiting.pop()
            left += term
            self._free.append(term)
            term, level = left, level + 1
        self._waiting.append((level, term))

    def total(self) -> torch.Tensor:
        """Return the sum of all terms, 0 if there are none."""
        if not self._waiting:
            return self.buffer().zero_()
        _, total = self._waiting.pop()
        while self._waiting:
            _, left = self._waiting.pop()
            left += total
            total = left
        return total
