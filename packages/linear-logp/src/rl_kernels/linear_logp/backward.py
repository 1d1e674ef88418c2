"""The backward loop of linear_logp, shared by the backends.

It takes pieces of the vocabulary in ascending order, and for each piece all blocks of rows in ascending order::

    for segment in vocabulary:              one, or eight
        for piece in segment:               dW[piece] is complete after this iteration
            for chain in rows:              all rows, or ``join_tokens`` of them
                for block in chain:         z of (block, piece), kept or with the bits of the forward pass
                    dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1
        dH -> Tree                          a chain that starts at 0 for each segment; a balanced tree adds the chains

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rl_kernels.core.constants import BIAS_STEP
from rl_kernels.core.gpu import processors
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.inputs import Inputs, cap_of, inputs_of, number_or_rows, part_of, slices
from rl_kernels.linear_logp.vocabulary import BLOCK, SEGMENTS, vocab_shards

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
        hidden, weight, ids, bias, scale, ignore_index, cap, norm, entropy, kept, *grads, start, vocab = args[:15]
        rows = [None if grad is None else grad.contiguous() for grad in grads]
        operands = hidden, weight, ids.contiguous(), bias, number_or_rows(scale), ignore_index, cap_of(cap)
        return Inputs._make((*operands, norm, entropy, kept, *rows, start, vocab))

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz ``[rows, width]``; its rows are padded so that TMA can address them for every width."""
        padded = -(-width // BLOCK) * BLOCK
        dz = hidden.new_empty((hidden.shape[0], padded))
        return dz if padded == width else dz[:, :width]

    def cut(
        self, hidden: torch.Tensor, columns: int, workspace: int, needed: Sequence[bool], buffers: int = 0
    ) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes.

        ``hidden`` has the rows of the longest chain, and a segment has ``columns``. ``buffers``: how many sums of a
        piece of dW lie beside them. On a GPU multiples of 256 and 128; all rows if a piece of 2048 columns then fits.
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


class _Piece(NamedTuple):
    """Columns of the vocabulary that are processed at once.

    Attributes:
        columns: counted from the shard's first column.
        continues: whether dH of earlier columns of the segment is continued.
        parts: the columns whose logits are recomputed, and those whose logits are kept, if there are any; and which
            columns of the piece these are.
    """

    columns: slice
    continues: bool
    parts: list[tuple[slice, slice]]


class Backward:
    """The backward pass for one kind of arguments: how it is cut, and its steps, prepared when they first run.

    Args:
        steps: those of a backend.
        args: the arguments of the raw op ``backward`` or, with two totals at the end, ``backward_main_grad``.
    """

    def __init__(self, steps: Steps, *args: Any) -> None:
        inputs, (segments, partial, workspace_mib, needed, join_tokens) = inputs_of(args[:15]), args[15:20]
        main_grad, bias_total = args[20:] or (None, None)
        (count, size), dtype = inputs.hidden.shape, inputs.hidden.dtype
        self._steps, self._needed, self._wide = steps, needed, compute_dtype(dtype)
        self._has_totals, self._has_bias_total = len(args) > 20, bias_total is not None
        self._dlogits: dict[tuple[int, int, int], Dlogits] = {}
        self._products: dict[tuple[bool, int, int, bool], Product] = {}
        self._is_cleaned = needed[1] and inputs.ignore_index is not None
        self._owns_weight = needed[1] and main_grad is None
        self._is_joined = join_tokens is not None and (needed[1] or needed[2])
        self._chain = min(join_tokens, count) if self._is_joined else count
        # The sum of a chain, and a total that is wider than dW.
        is_narrow = self._owns_weight and dtype != self._wide
        buffers = 1 + is_narrow if self._is_joined and needed[1] else 0
        workspace = _default_workspace(inputs.hidden) if workspace_mib is None else workspace_mib << 20
        workspace -= count * size * (dtype.itemsize * self._is_cleaned + self._wide.itemsize * needed[0])
        parts = _segments(inputs, segments) if count else []
        width = height = 1
        if parts:
            longest, columns = inputs.hidden[: self._chain], parts[0].stop - parts[0].start
            width, height = steps.cut(longest, columns, workspace, needed, buffers)
        self._height, self._is_wide = height, is_narrow and (self._is_joined or height < count)
        self._segments = [list(_pieces(part, width, inputs.first_kept)) for part in parts]
        # An empty segment is +0, so a sum with it is never -0.
        self._has_zeros = segments > 1 and _are_some_empty(inputs.vocab)
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
        inputs, dhidden, dweight, main_grad, dbias = self._begin(args)
        count, tree = inputs.hidden.shape[0], None if len(self._segments) == 1 else Tree(dhidden)
        for pieces in self._segments:
            if tree is not None:
                dhidden = tree.buffer()
            for piece in pieces:
                weight, width = part_of(inputs.weight, piece.columns), piece.columns.stop - piece.columns.start
                totals = sums = self._totals(piece.columns, dweight, main_grad, dbias)
                if is_joined:
                    sums = [None if x is None else x.new_empty(x.shape) for x in totals]
                for begin in range(0, count, self._chain):
                    end = min(begin + self._chain, count)
                    if is_joined and sums[1] is not None:
                        sums[1].zero_()
                    for first in range(begin, end, self._height):
                        rows = slice(first, min(first + self._height, end))
                        block, height = inputs.block(rows), rows.stop - first
                        dz = steps.room(block.hidden, width)
                        for columns, here in piece.parts:
                            bias = None if sums[1] is None else part_of(sums[1], here)
                            part = dz if here.stop - here.start == width else dz[:, here]
                            step = dlogits.get(key := (height, columns.start, columns.stop)) or dlogits.setdefault(
                                key, steps.dlogits(block, columns, bias, part)
                            )
                            step(block, bias, part)
                        if needed[0]:
                            out = part_of(dhidden, rows)
                            product = products.get(of_rows := (False, height, width, piece.continues))
                            product = product or products.setdefault(
                                of_rows, steps.dhidden(dz, weight, out, continues=piece.continues)
                            )
                            product(dz, weight, out)
                        if sums[0] is not None:
                            in_turn = first > begin or (main_grad is not None and not is_joined)
                            product = products.get(of_tokens := (True, height, width, in_turn))
                            product = product or products.setdefault(
                                of_tokens, steps.dweight(dz, block.hidden, sums[0], continues=in_turn)
                            )
                            product(dz, block.hidden, sums[0])
                        # Free dz before the next one is allocated.
                        del dz, part
                    for total, chain in zip(totals, sums, strict=True) if is_joined else ():
                        if total is not None and chain is not None:
                            total += chain
                if self._is_wide and dweight is not None and totals[0] is not None:
                    dweight[piece.columns] = totals[0]
                # Free the buffers before the next ones are allocated.
                del totals, sums
            if self._has_zeros and pieces is self._segments[-1]:
                dhidden += 0.0
            if tree is not None:
                tree.add(dhidden)
        return self._finish(inputs, dhidden if tree is None else tree.total(), dweight, dbias)

    def _begin(
        self, args: Any
    ) -> tuple[Inputs, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the inputs as the steps read them, and dH, dW, ``main_grad`` and dbias where needed."""
        inputs, (main_grad, dbias) = self._steps.begin(args), args[20:] or (None, None)
        hidden, weight = inputs.hidden, inputs.weight
        if self._is_cleaned:
            # Ignored rows add 0 to dW, also where they are NaN or inf.
            inputs = inputs._replace(hidden=inputs.keep(hidden))
        dweight = weight.new_empty(weight.shape) if self._owns_weight else None
        if dweight is not None and not self._segments:
            dweight.zero_()
        if self._needed[2] and dbias is None:
            dbias = hidden.new_zeros(weight.shape[0], dtype=self._wide)
        dhidden = hidden.new_empty(hidden.shape if self._needed[0] else 0, dtype=self._total)
        _, needs_weight, needs_bias = self._needed
        return inputs, dhidden, dweight, main_grad if needs_weight else None, dbias if needs_bias else None

    def _totals(
        self, columns: slice, dweight: torch.Tensor | None, main_grad: torch.Tensor | None, dbias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Return where dW and dbias of a piece are summed; dW is 0 where chains are added to it."""
        bias = None if dbias is None else part_of(dbias, columns)
        if main_grad is not None:
            return [part_of(main_grad, columns), bias]
        if dweight is None:
            return [None, bias]
        weight = part_of(dweight, columns)
        if self._is_wide:
            weight = torch.empty_like(weight, dtype=self._wide)
        return [weight.zero_() if self._is_joined else weight, bias]

    def _finish(
        self, inputs: Inputs, dhidden: torch.Tensor, dweight: torch.Tensor | None, dbias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Round the gradients."""
        if self._needed[0] and inputs.ignore_index is not None:
            # dz of ignored rows is 0, but 0 times a weight of NaN or inf is NaN.
            dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
        dtype, empty = inputs.hidden.dtype, inputs.hidden.new_empty
        if dhidden.dtype != self._result:
            dhidden = dhidden.to(self._result)
        rounded = empty(0) if dbias is None or self._has_bias_total else dbias.to(dtype)
        if self._has_totals:
            return dhidden, rounded
        return dhidden, empty(0) if dweight is None else dweight, rounded


class Tree:
    """Adds terms in the order in which they come, by a balanced tree that holds few of them: ``(0 + 1) + (2 + 3)``.

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


def _pieces(segment: slice, width: int, first_kept: int) -> Iterator[_Piece]:
    """Cut a segment into pieces of ``width`` columns."""
    for part in slices(segment.stop - segment.start, width):
        start, stop = segment.start + part.start, segment.start + part.stop
        kept = min(max(first_kept, start), stop)
        bounds = [(first, end) for first, end in ((start, kept), (kept, stop)) if first < end]
        parts = [(slice(first, end), slice(first - start, end - start)) for first, end in bounds]
        yield _Piece(slice(start, stop), part.start > 0, parts)


def _segments(inputs: Inputs, number: int) -> list[slice]:
    """Return the segments of the vocabulary in this shard that are not empty, counted from its first column."""
    here = inputs.weight.shape[0]
    bounds = vocab_shards(inputs.vocab, number) if number > 1 else ((inputs.start, inputs.start + here),)
    parts = [slice(first - inputs.start, last - inputs.start) for first, last in bounds]
    return [part for part in parts if 0 <= part.start < part.stop <= here]


def _are_some_empty(vocab: int) -> bool:
    first, last = vocab_shards(vocab, SEGMENTS)[-1]
    return first == last
