"""The sums over the tokens of a call, dW and dbias, for one piece of the vocabulary: one chain each, or several.

With ``join_tokens`` the rows are cut into parts of that many, counted from the first of the call, ignored rows too.
Each part is a chain that starts at 0, in buffers of its own; it is then added to the total, rounded to nearest, in
ascending order. So a batch that is split at multiples of ``join_tokens`` rows gives ``main_grad`` the same bits, and
appended ignored rows add zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The gradients of weight and bias, and how their tokens are cut.

    Attributes:
        dweight: ``[V, D]`` in the dtype of the inputs; empty with ``main_grad``, or if it is not needed.
        main_grad: ``[V, D]`` in the compute dtype, to which dW is added, or None.
        dbias: ``[V]`` in the compute dtype.
        needed: whether dW and dbias are needed.
        join_tokens: rows of a chain, or None for one chain.
    """

    dweight: torch.Tensor
    main_grad: torch.Tensor | None
    dbias: torch.Tensor
    needed: tuple[bool, bool]
    join_tokens: int | None

    @classmethod
    def of(
        cls,
        dweight: torch.Tensor,
        main_grad: torch.Tensor | None,
        dbias: torch.Tensor,
        needed: Sequence[bool],
        join_tokens: int | None,
    ) -> Totals:
        """Return the totals; ``needed`` lists the gradients of hidden, weight and bias."""
        _, of_weight, of_bias = needed
        return cls(dweight, main_grad, dbias, (of_weight, of_bias), join_tokens if of_weight or of_bias else None)

    def rows_of_chain(self, count: int) -> int:
        """Return the rows of the longest chain of a call of ``count`` rows."""
        return count if self.join_tokens is None else min(count, self.join_tokens)

    @property
    def buffers(self) -> int:
        """How many sums of a piece of dW the chains need: that of a chain, and a total that is wider than dW."""
        if self.join_tokens is None or not self.needed[0]:
            return 0
        return 1 + (self.main_grad is None and self._dtype != self.dweight.dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.dweight.dtype)

    def piece(self, columns: slice, *, in_blocks: bool) -> Sums:
        """Return the sums of a piece. ``in_blocks``: the rows of a chain do not all come at once."""
        of_weight, of_bias = self.needed
        weight = self._weight(columns, in_blocks=in_blocks) if of_weight else None
        return Sums(weight, self.dbias[columns] if of_bias else None, self.main_grad is not None)

    def _weight(self, columns: slice, *, in_blocks: bool) -> torch.Tensor:
        """Return main_grad, dW itself if one block completes it, or a wider buffer; 0 where chains are added to it."""
        if self.main_grad is not None:
            return self.main_grad[columns]
        total, is_joined = self.dweight[columns], self.join_tokens is not None
        if (in_blocks or is_joined) and total.dtype != self._dtype:
            total = torch.empty_like(total, dtype=self._dtype)
        return total.zero_() if is_joined else total

    def finish(self, columns: slice, total: Sums) -> None:
        """Round the total of a piece to dW, if it is wider."""
        if total.weight is not None and self.main_grad is None and total.weight.dtype != self.dweight.dtype:
            self.dweight[columns] = total.weight
