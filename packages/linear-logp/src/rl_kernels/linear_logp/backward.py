"""The backward loop of linear_logp, shared by the backends.

It takes pieces of the vocabulary in ascending order, and for each piece all blocks of rows in ascending order::

    for segment in vocabulary:              one, or eight
        for piece in segment:               dW[piece] is complete after this iteration
            for chain in rows:              all rows, or ``join_tokens`` of them
                for block in chain:         z of (block, piece), kept or with the bits of the forward pass
                    dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1
        dH -> tree                          a chain that starts at 0 for each segment; a balanced tree adds the chains

This order is the contract. dH accumulates over pieces, so its rows do not depend on the batch. dW and dbias are chains
over tokens that start at the first row. With ``join_tokens`` each part of that many rows, counted from the first of the
call, ignored rows too, is a chain that starts at 0, in buffers of its own; it is then added to the total, rounded to
nearest. So a batch that is split at multiples of ``join_tokens`` rows gives ``main_grad`` the same bits, and appended
ignored rows add zeros. The height of a block depends on the workspace; each backend rounds it so that it changes no
bit. The segments of a shard are a subtree, so ranks add one partial sum each, by the rest of the tree.

On a GPU dH is a canonical chain over the vocabulary, or over each of its segments; dW one over the tokens. For FP32
inputs the chain of dH has spans of 256 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_kernels.core.constants import BIAS_STEP
from rl_kernels.core.gpu import processors
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp import kept_columns
from rl_kernels.linear_logp.inputs import Inputs, cap_of, inputs_of, number_or_rows, part_of
from rl_kernels.linear_logp.vocabulary import BLOCK, has_empty_segments, pieces_of, segments_of

COLUMNS, MOST_ROWS, LEAST = 33792, 16384, 256 << 20
"""Of the default workspace: columns of dz, 256 for each of 132 multiprocessors; rows that count; and least bytes."""
LEAST_PIECE, LEAST_HEIGHT = 2048, 4096
"""Fewest columns and rows that backward processes at once, even beyond the workspace: fewer would be slow."""
Dlogits = Callable[[Inputs, "torch.Tensor | None", torch.Tensor], object]
"""Called with a block of rows, dbias and dz; see ``Steps.dlogits``."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Called with both operands and the output."""


class Steps:
    """The steps of a backend for one piece of the vocabulary and one block of rows; by default those of GPU backends.

    ``dlogits``, ``dhidden`` and ``dweight`` prepare a step for tensors like those given; the step is called with such
    tensors, at other addresses.
    """

    def begin(self, args: Any) -> Inputs:
        """Return the inputs of a call, from the arguments of its raw op, in the layouts that the steps read."""
        hidden, weight, ids, bias, scale, ignore_index, cap, least, norm, entropy, kept, *grads, start, vocab = args[
            :16
        ]
        rows = [None if grad is None else grad.contiguous() for grad in grads]
        operands = hidden, weight, ids.contiguous(), bias, number_or_rows(scale), ignore_index, cap_of(cap)
        least = None if least is None else least.contiguous()
        return Inputs._make((*operands, least, norm, entropy, kept, *rows, start, vocab, None, None))

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz ``[rows, width]``; its rows are padded so that TMA can address them for every width."""
        padded = -(-width // BLOCK) * BLOCK
        dz = hidden.new_empty(hidden.shape[0], padded)
        return dz if padded == width else dz[:, :width]

    def cut(
        self, hidden: torch.Tensor, columns: int, workspace: int, needed: Sequence[bool], buffers: int = 0
    ) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes.

        ``hidden`` has the rows of the longest chain, and a segment has ``columns``. ``buffers``: the number of sums
        of a piece of dW beside them. On a GPU multiples of 256 and 128; all rows if a piece of 2048 columns then fits.
        """
        count, size = hidden.shape
        # Besides dz, the workspace holds the row sums that are added into dbias.
        tile = self.summed(hidden)
        item, part = hidden.itemsize, 4 * needed[2]
        width = workspace // (count * item + -(-count // tile) * part + 4 * size * buffers) // BLOCK * BLOCK
        if width >= min(columns, LEAST_PIECE):
            return _piece_width(width, columns, hidden), -(-count // BIAS_STEP) * BIAS_STEP
        height = (workspace - 4 * LEAST_PIECE * size * max(buffers, 1)) * tile // (LEAST_PIECE * (item * tile + part))
        return LEAST_PIECE, max(height, LEAST_HEIGHT) // BIAS_STEP * BIAS_STEP

    def summed(self, hidden: torch.Tensor) -> int:
        """Return how many rows are summed into one term of dbias."""
        raise NotImplementedError

    def dlogits(self, block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Dlogits:
        """Write dz of columns to ``dz``, columns of ``room``; add the row sum of the unrounded dz to dbias.

        The logits of these columns are all kept (``block.kept_part``), or none of them.
        """
        raise NotImplementedError

    def dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz @ weight`` to ``out[rows, D]`` in its dtype, or add it if ``continues``."""
        raise NotImplementedError

    def dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz^T @ hidden`` to ``out[piece, D]`` in its dtype, or add it if ``continues``; 16 rows per step."""
        raise NotImplementedError


class Backward:
    """The backward pass for one kind of arguments: how it is cut, and its steps, prepared when they first run.

    Args:
        steps: those of a backend.
        args: the arguments of the raw op ``backward`` or, with two totals at the end, ``backward_main_grad``.
    """

    def __init__(self, steps: Steps, *args: Any) -> None:
        inputs = inputs_of(args[:16])
        segments, partial, given, workspace_mib, needed, join_tokens, frees = args[16:23]
        main_grad, bias_total = args[23:] or (None, None)
        if given is not None:
            inputs = inputs._replace(kept=None)
        (count, size), columns, dtype = inputs.hidden.shape, inputs.weight.shape[0], inputs.hidden.dtype
        self._steps, self._needed, self._wide = steps, needed, compute_dtype(dtype)
        self._prepare_dlogits = steps.dlogits if given is None else kept_columns.scattered
        self._has_totals, self._has_bias_total = len(args) > 23, bias_total is not None
        self._dlogits: dict[tuple[int, int, int], Dlogits] = {}
        self._products: dict[tuple[bool, int, int, bool], Product] = {}
        self._is_cleaned = needed[1] and inputs.ignore_index is not None
        self._owns_weight = needed[1] and main_grad is None
        self._is_joined = join_tokens is not None and (needed[1] or needed[2])
        chain = max(min(join_tokens, count) if self._is_joined else count, 1)
        # The sum of a chain, and a total that is wider than dW.
        is_narrow = self._owns_weight and dtype != self._wide
        buffers = 1 + is_narrow if self._is_joined and needed[1] else 0
        workspace = _default_workspace(inputs.hidden) if workspace_mib is None else workspace_mib << 20
        workspace -= count * size * (dtype.itemsize * self._is_cleaned + self._wide.itemsize * needed[0])
        parts = segments_of(inputs.start, columns, inputs.vocab, segments) if count else []
        width, height = 1, max(count, 1)
        if parts:
            longest = inputs.hidden[:chain]
            width, height = steps.cut(longest, parts[0].stop - parts[0].start, workspace, needed, buffers)
        self._is_wide = is_narrow and (self._is_joined or height < count)
        self._segments = [pieces_of(part, width, inputs.first_kept) for part in parts]
        self._last_piece = self._segments[-1][-1] if frees and parts else None
        # Rows, and whether they begin and end a chain over tokens.
        self._blocks = [
            (slice(first, min(first + height, end)), first == begin, first + height >= end)
            for begin, end in ((begin, min(begin + chain, count)) for begin in range(0, count, chain))
            for first in range(begin, end, height)
        ]
        # An empty segment is +0, so a sum with it is never -0.
        self._has_zeros = segments > 1 and has_empty_segments(inputs.vocab)
        self._result = self._wide if partial else dtype
        # A single product is rounded when it is written; but the +0 of an empty segment is added before rounding.
        is_product = len(parts) == 1 == len(self._segments[0]) and not self._has_zeros
        self._total = self._result if is_product else self._wide

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty if not needed.

        That of hidden is partial, in the compute dtype, if the op says so. With totals, those of hidden and bias.
        """
        steps, needed, is_joined = self._steps, self._needed, self._is_joined
        dlogits, products = self._dlogits, self._products
        inputs, given = steps.begin(args), args[18]
        if given is not None:
            dz = kept_columns.gradient(inputs_of(args[:16]), given)
            if args[22]:
                _free(inputs.kept)
            inputs = inputs._replace(kept=None, columns=given, dz=dz)
        inputs, main_grad, dbias = self._begin(inputs, *args[23:])
        dweight: torch.Tensor | None = None
        waiting: list[torch.Tensor] = []
        shape = inputs.hidden.shape if needed[0] else (0,)
        for number, pieces in enumerate(self._segments, 1):
            dhidden: torch.Tensor | None = None
            for piece in pieces:
                weight, width = part_of(inputs.weight, piece.columns), piece.columns.stop - piece.columns.start
                bias_total = bias_sum = None if dbias is None else part_of(dbias, piece.columns)
                if is_joined and bias_total is not None:
                    bias_sum = bias_total.new_empty(bias_total.shape)
                weight_total = weight_sum = None
                for rows, begins, ends in self._blocks:
                    if is_joined and begins and bias_sum is not None:
                        bias_sum.zero_()
                    block, height = inputs.block(rows), rows.stop - rows.start
                    dz = steps.room(block.hidden, width)
                    for columns, here in piece.parts:
                        bias = None if bias_sum is None else part_of(bias_sum, here)
                        part = dz if here.stop - here.start == width else dz[:, here]
                        step = dlogits.get(key := (height, columns.start, columns.stop))
                        if step is None:
                            step = dlogits[key] = self._prepare_dlogits(block, columns, bias, part)
                        step(block, bias, part)
                    # Gradients are allocated after the last logits are freed: what is largest never exists at once.
                    if piece is self._last_piece and rows is self._blocks[-1][0]:
                        _free(inputs.kept)
                    if dhidden is None:
                        dhidden = inputs.hidden.new_empty(*shape, dtype=self._total)
                    if needed[0]:
                        out = part_of(dhidden, rows)
                        product = products.get(of := (False, height, width, piece.continues))
                        if product is None:
                            product = products[of] = steps.dhidden(dz, weight, out, continues=piece.continues)
                        product(dz, weight, out)
                    if needed[1]:
                        if weight_sum is None:
                            if dweight is None and self._owns_weight:
                                dweight = inputs.weight.new_empty(inputs.weight.shape)
                            weight_total = weight_sum = self._weight_total(piece.columns, dweight, main_grad)
                            if is_joined:
                                weight_sum = weight_total.new_empty(weight_total.shape)
                        continues = not begins or (main_grad is not None and not is_joined)
                        product = products.get(of := (True, height, width, continues))
                        if product is None:
                            product = products[of] = steps.dweight(dz, block.hidden, weight_sum, continues=continues)
                        product(dz, block.hidden, weight_sum)
                    # Free dz before the next one is allocated.
                    del dz, part
                    if is_joined and ends:
                        for total, chain in ((weight_total, weight_sum), (bias_total, bias_sum)):
                            if total is not None and chain is not None:
                                total += chain
                if self._is_wide and dweight is not None and weight_total is not None:
                    dweight[piece.columns] = weight_total
                # Free the buffers before the next ones are allocated.
                del weight_total, weight_sum
            assert dhidden is not None
            if self._has_zeros and number == len(self._segments):
                dhidden += 0.0
            add_segment(waiting, number, dhidden)
        dhidden = total_of(waiting) if waiting else inputs.hidden.new_zeros(shape, dtype=self._total)
        return self._finish(inputs, dhidden, dweight, dbias)

    def _begin(
        self, inputs: Inputs, main_grad: torch.Tensor | None = None, dbias: torch.Tensor | None = None
    ) -> tuple[Inputs, torch.Tensor | None, torch.Tensor | None]:
        """Return the inputs, in which ignored rows are 0 if needed, and ``main_grad`` and dbias where needed."""
        weight, (_, needs_weight, needs_bias) = inputs.weight, self._needed
        if self._is_cleaned:
            # Ignored rows add 0 to dW, also where they are NaN or inf.
            inputs = inputs._replace(hidden=inputs.keep(inputs.hidden))
        if needs_bias and dbias is None:
            dbias = weight.new_zeros(weight.shape[0], dtype=self._wide)
        return inputs, main_grad if needs_weight else None, dbias if needs_bias else None

    def _weight_total(
        self, columns: slice, dweight: torch.Tensor | None, main_grad: torch.Tensor | None
    ) -> torch.Tensor:
        """Return where dW of a piece is summed; 0 where chains are added to it."""
        if main_grad is not None:
            return part_of(main_grad, columns)
        assert dweight is not None
        total = part_of(dweight, columns)
        if self._is_wide:
            total = torch.empty_like(total, dtype=self._wide)
        return total.zero_() if self._is_joined else total

    def _finish(
        self, inputs: Inputs, dhidden: torch.Tensor, dweight: torch.Tensor | None, dbias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Round the gradients."""
        if self._needed[0] and inputs.ignore_index is not None:
            # dz of ignored rows is 0, but 0 times a weight of NaN or inf is NaN.
            dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
        if dweight is None and self._owns_weight:
            # No token, or no column.
            dweight = inputs.weight.new_zeros(inputs.weight.shape)
        dtype, empty = inputs.hidden.dtype, inputs.hidden.new_empty
        if dhidden.dtype != self._result:
            dhidden = dhidden.to(self._result)
        rounded = empty(0) if dbias is None or self._has_bias_total else dbias.to(dtype)
        if self._has_totals:
            return dhidden, rounded
        return dhidden, empty(0) if dweight is None else dweight, rounded


def add_segment(waiting: list[torch.Tensor], number: int, part: torch.Tensor) -> None:
    """Add the part of a segment, counted from 1, to the sums of a balanced tree over the segments before it.

    A segment that ends a pair is added to its sibling.
    """
    while number % 2 == 0:
        part, number = waiting.pop().add_(part), number // 2
    waiting.append(part)


def total_of(waiting: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all segments that were added."""
    total = waiting.pop()
    while waiting:
        total = waiting.pop().add_(total)
    return total


def _free(kept: torch.Tensor | None) -> None:
    if kept is not None:
        kept.data = kept.new_empty(0, 0)


def _default_workspace(hidden: torch.Tensor) -> int:
    """Return bytes for the buffer of dH and for dz of pieces so wide that continuing dH costs little."""
    count, size = hidden.shape
    buffer = count * size * compute_dtype(hidden.dtype).itemsize
    return max(buffer + min(count, MOST_ROWS) * COLUMNS * hidden.itemsize, LEAST)


def _piece_width(width: int, columns: int, hidden: torch.Tensor) -> int:
    """Return the columns of a piece, at most ``width``: in whole rounds of tiles over the GPU, else pieces alike."""
    units = processors(hidden.get_device()) if hidden.is_cuda else 1
    # Tiles of 128 rows and 256 columns.
    rounds = units // math.gcd(units, -(-hidden.shape[0] // BIAS_STEP)) * BLOCK
    if units > 1 and rounds <= width < columns:
        return width // rounds * rounds
    pieces = -(-columns // width)
    alike = -(-columns // pieces)
    return -(-alike // BLOCK) * BLOCK
