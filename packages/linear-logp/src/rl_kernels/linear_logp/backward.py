"""The backward loop of linear_logp, shared by the backends.

It takes pieces of the vocabulary in ascending order, and for each piece all blocks of rows in ascending order::

    for segment in vocabulary:              one, or eight
        for piece in segment:               dW[piece] is complete after this iteration
            for chain in rows:              all rows, or ``join_tokens`` of them
                for block in chain:         z of (block, piece), kept or with the bits of the forward pass
                    dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1
        dH -> Tree                          a chain that starts at 0 for each segment; a balanced tree adds the chains

This order is the contract. dH accumulates over pieces, so its rows do not depend on the batch. dW and dbias are chains
over tokens that start at the first row; with ``join_tokens`` sums of chains, which start at 0 at each multiple of it.
The height of a block depends on the workspace; each backend rounds it so that it changes no bit. The segments of a
shard are a subtree, so ranks add one partial sum each, by the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.inputs import Inputs, cap_of, part_of, slices
from rl_kernels.linear_logp.sums import Totals, Tree
from rl_kernels.linear_logp.vocabulary import SEGMENTS, vocab_shards

COLUMNS, MOST_ROWS, LEAST = 33792, 16384, 256 << 20
"""Of the default workspace: columns of dz, 256 for each of 132 multiprocessors; rows that count; and least bytes."""
Dlogits = Callable[[Inputs, "torch.Tensor | None", torch.Tensor], object]
"""Called with a block of rows, dbias and dz; see ``Steps.dlogits``."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Called with both operands and the output."""


class Steps(Protocol):
    """The steps of a backend for one piece of the vocabulary and one block of rows.

    ``dlogits``, ``dhidden`` and ``dweight`` prepare a step for tensors like those given; the step is called with such
    tensors, at other addresses.
    """

    def cut(
        self, hidden: torch.Tensor, columns: int, workspace: int, needed: Sequence[bool], buffers: int = 0
    ) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes.

        ``hidden`` has the rows of the longest chain, and a segment has ``columns``. ``buffers``: how many sums of a
        piece of dW lie beside them.
        """

    def begin(self, inputs: Inputs) -> Inputs:
        """Return the inputs of a call in the layouts that the steps read."""

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz ``[rows, width]``, in the dtype of the inputs."""

    def dlogits(self, block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Dlogits:
        """Write dz of columns to ``dz``, columns of ``room``; add the row sum of the unrounded dz to dbias.

        The logits of these columns are all kept (``block.kept_part``), or none of them.
        """

    def dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz @ weight`` to ``out[rows, D]``, or add it if ``continues``."""

    def dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz^T @ hidden`` to ``out[piece, D]`` in its dtype, or add it if ``continues``; 16 rows per step."""


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
        inputs, (segments, partial, workspace_mib, needed, join_tokens) = _inputs_of(args), args[15:20]
        main_grad, bias_total = args[20:] or (None, None)
        (count, size), dtype = inputs.hidden.shape, inputs.hidden.dtype
        self._steps, self._needed, self._wide = steps, needed, compute_dtype(dtype)
        self._has_totals, self._has_bias_total = len(args) > 20, bias_total is not None
        self._dhidden_dtype = self._wide if partial else dtype
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

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty if not needed.

        That of hidden is partial, in the compute dtype, if the op says so. With totals, those of hidden and bias.
        """
        steps, needed = self._steps, self._needed
        inputs, tree, totals = self._begin(*args)
        count = inputs.hidden.shape[0]
        for pieces in self._segments:
            dhidden = tree.buffer()
            for piece in pieces:
                weight = part_of(inputs.weight, piece.columns)
                total = sums = totals.piece(piece.columns)
                if self._is_joined:
                    sums = total.room()
                for begin in range(0, count, self._chain):
                    if self._is_joined:
                        sums.begin()
                    end = min(begin + self._chain, count)
                    for first in range(begin, end, self._height):
                        rows = slice(first, min(first + self._height, end))
                        block = inputs.block(rows)
                        dz = steps.room(block.hidden, piece.columns.stop - piece.columns.start)
                        for columns, here in piece.parts:
                            dbias, part = None if sums.bias is None else part_of(sums.bias, here), _columns(dz, here)
                            self._step(block, columns, dbias, part)(block, dbias, part)
                        if needed[0]:
                            out = part_of(dhidden, rows)
                            self._product(False, dz, weight, out, piece.continues)(dz, weight, out)
                        if sums.weight is not None:
                            in_turn = first > begin or sums.is_begun
                            self._product(True, dz, block.hidden, sums.weight, in_turn)(dz, block.hidden, sums.weight)
                        # Free dz before the next one is allocated.
                        del dz, part
                    if self._is_joined:
                        total.add(sums)
                totals.finish(piece.columns, total)
                # Free the buffers before the next ones are allocated.
                del total, sums
            if self._has_zeros and pieces is self._segments[-1]:
                dhidden += 0.0
            tree.add(dhidden)
        return self._finish(inputs, tree.total(), totals)

    def _begin(self, *args: Any) -> tuple[Inputs, Tree, Totals]:
        """Return the inputs as the steps read them, and room for the gradients."""
        inputs, (main_grad, bias_total) = self._steps.begin(_inputs_of(args)), args[20:] or (None, None)
        hidden, weight = inputs.hidden, inputs.weight
        if self._is_cleaned:
            # Ignored rows add 0 to dW, also where they are NaN or inf.
            inputs = inputs._replace(hidden=inputs.keep(hidden))
        dhidden = hidden.new_empty(hidden.shape if self._needed[0] else 0, dtype=self._wide)
        dweight = weight.new_empty(weight.shape) if self._owns_weight else None
        if dweight is not None and not self._segments:
            dweight.zero_()
        if self._needed[2] and bias_total is None:
            bias_total = hidden.new_zeros(weight.shape[0], dtype=self._wide)
        totals = Totals(
            dweight,
            main_grad if self._needed[1] else None,
            bias_total if self._needed[2] else None,
            self._is_wide,
            self._is_joined,
        )
        return inputs, Tree(dhidden), totals

    def _finish(self, inputs: Inputs, dhidden: torch.Tensor, totals: Totals) -> tuple[torch.Tensor, ...]:
        """Round the gradients."""
        if self._needed[0] and inputs.ignore_index is not None:
            # dz of ignored rows is 0, but 0 times a weight of NaN or inf is NaN.
            dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
        dhidden, empty = dhidden.to(self._dhidden_dtype), inputs.hidden.new_empty(0)
        dbias = empty if totals.dbias is None or self._has_bias_total else totals.dbias.to(inputs.hidden.dtype)
        if self._has_totals:
            return dhidden, dbias
        return dhidden, empty if totals.dweight is None else totals.dweight, dbias

    def _step(self, block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Dlogits:
        key = block.hidden.shape[0], columns.start, columns.stop
        step = self._dlogits.get(key)
        if step is None:
            step = self._dlogits[key] = self._steps.dlogits(block, columns, dbias, dz)
        return step

    def _product(
        self, of_weight: bool, dz: torch.Tensor, operand: torch.Tensor, out: torch.Tensor, continues: bool
    ) -> Product:
        key = of_weight, *dz.shape, continues
        product = self._products.get(key)
        if product is None:
            prepare = self._steps.dweight if of_weight else self._steps.dhidden
            product = self._products[key] = prepare(dz, operand, out, continues=continues)
        return product


def _inputs_of(args: Any) -> Inputs:
    return Inputs._make((*args[:6], cap_of(args[6]), *args[7:15]))


def _default_workspace(hidden: torch.Tensor) -> int:
    """Return bytes for the buffer of dH and for dz of pieces so wide that continuing dH costs little."""
    count, size = hidden.shape
    buffer = count * size * compute_dtype(hidden.dtype).itemsize
    return max(buffer + min(count, MOST_ROWS) * COLUMNS * hidden.itemsize, LEAST)


def _pieces(segment: slice, width: int, first_kept: int) -> Iterator[_Piece]:
    """Cut a segment into pieces of ``width`` columns."""
    for part in slices(segment.stop - segment.start, width):
        start, stop = segment.start + part.start, segment.start + part.stop
        kept = min(max(first_kept, start), stop)
        bounds = [(first, end) for first, end in ((start, kept), (kept, stop)) if first < end]
        parts = [(slice(first, end), slice(first - start, end - start)) for first, end in bounds]
        yield _Piece(slice(start, stop), part.start > 0, parts)


def _columns(x: torch.Tensor, part: slice) -> torch.Tensor:
    return x if part.start == 0 and part.stop == x.shape[1] else x[:, part]


def _segments(inputs: Inputs, number: int) -> list[slice]:
    """Return the segments of the vocabulary in this shard that are not empty, counted from its first column."""
    here = inputs.weight.shape[0]
    bounds = vocab_shards(inputs.vocab, number) if number > 1 else ((inputs.start, inputs.start + here),)
    parts = [slice(first - inputs.start, last - inputs.start) for first, last in bounds]
    return [part for part in parts if 0 <= part.start < part.stop <= here]


def _are_some_empty(vocab: int) -> bool:
    first, last = vocab_shards(vocab, SEGMENTS)[-1]
    return first == last
