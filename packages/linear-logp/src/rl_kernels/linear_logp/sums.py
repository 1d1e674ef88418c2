"""The sums over the tokens of a call, dW and dbias, for one piece of the vocabulary: one chain each, or several.

With ``join_tokens`` the rows are cut into parts of that many, counted from the first of the call, ignored rows too.
Each part is a chain that starts at 0, in buffers of its own; it is then added to the total, rounded to nearest, in
ascending order. So a batch that is split at multiples of ``join_tokens`` rows gives ``main_grad`` the same bits, and
appended ignored rows add zeros.

The gradients of hidden of all segments are added by a balanced binary tree that holds few of its terms at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core.rowwise.operands import compute_dtype


class Sums(NamedTuple):
    """Buffers of a piece to which terms are added.

    Attributes:
        weight: ``[piece, D]``, or None if it is not needed.
        bias: ``[piece]`` in the compute dtype, or None.
        is_begun: whether ``weight`` holds a sum that is continued; otherwise it is overwritten.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    is_begun: bool

    def room(self) -> Sums:
        """Return uninitialized buffers for a chain that is to be added to these totals."""
        weight, bias = (None if value is None else value.new_empty(value.shape) for value in self[:2])
        return Sums(weight, bias, False)

    def begin(self) -> None:
        """Begin a chain. The first term overwrites ``weight``."""
        if self.bias is not None:
            self.bias.zero_()

    def add(self, chain: Sums) -> None:
        """Add a chain to these totals."""
        for total, value in zip(self[:2], chain[:2], strict=True):
            if total is not None and value is not None:
                total += value


class Totals(NamedTuple):
    """The gradients of weight and bias.

    Attributes:
        dweight: ``[V, D]`` in the dtype of the inputs, or None if it is not needed, or added to ``main_grad``.
        main_grad: ``[V, D]`` in the compute dtype, to which dW is added, or None.
        dbias: ``[V]`` in the compute dtype, or None.
        is_wide: whether a piece of dW is summed in a buffer of the compute dtype.
        is_joined: whether chains are added to a total.
    """

    dweight: torch.Tensor | None
    main_grad: torch.Tensor | None
    dbias: torch.Tensor | None
    is_wide: bool
    is_joined: bool

    def piece(self, columns: slice) -> Sums:
        """Return the sums of a piece, 0 where chains are added to them."""
        bias = None if self.dbias is None else self.dbias[columns]
        if self.main_grad is not None:
            return Sums(self.main_grad[columns], bias, True)
        if self.dweight is None:
            return Sums(None, bias, False)
        weight = self.dweight[columns]
        if self.is_wide:
            weight = torch.empty_like(weight, dtype=compute_dtype(weight.dtype))
        return Sums(weight.zero_() if self.is_joined else weight, bias, False)

    def finish(self, columns: slice, total: Sums) -> None:
        """Round the total of a piece to dW, if it is wider."""
        if self.is_wide and self.dweight is not None and total.weight is not None:
            self.dweight[columns] = total.weight


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
