"""The backward loop of linear_logp, shared by the backends.

It takes pieces of the vocabulary in ascending order, and for each piece all blocks of rows in ascending order::

    for segment in vocabulary:              one, or eight
        for piece in segment:               dW[piece] is complete after this iteration
            for block in rows:              z of (block, piece), kept or with the bits of the forward pass
                dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1
        dH -> Tree                          a chain that starts at 0 for each segment; a balanced tree adds the chains

This order is the contract. dH accumulates over pieces, so its rows do not depend on the batch. dW and dbias are chains
over tokens that start at the first row. The height of a block depends on the workspace; each backend rounds it so that
it changes no bit. The segments of a shard are a subtree, so ranks add one partial sum each, by the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from rl_kernels.core import rowwise
from rl_kernels.linear_logp.inputs import Inputs, slices
from rl_kernels.linear_logp.tree import Tree
from rl_kernels.linear_logp.vocabulary import SEGMENTS, vocab_shards

COLUMNS, MOST_ROWS, LEAST = 33792, 16384, 256 << 20
"""Of the default workspace: columns of dz, 256 for each of 132 multiprocessors; rows that count; and least bytes."""


def default_workspace(hidden: torch.Tensor) -> int:
    """Return bytes for the buffer of dH and for dz of pieces so wide that continuing dH costs little."""
    count, size = hidden.shape
    buffer = count * size * rowwise.compute_dtype(hidden.dtype).itemsize
    return max(buffer + min(count, MOST_ROWS) * COLUMNS * hidden.itemsize, LEAST)


class Steps(Protocol):
    """The steps of a backend for one piece of the vocabulary and one block of rows."""

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool]) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes."""

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz ``[rows, width]``, in the dtype of the inputs."""

    def dlogits(
        self,
        block: Inputs,
        upstream: rowwise.LogpUpstream,
        columns: slice,
        dbias: torch.Tensor | None,
        dz: torch.Tensor,
    ) -> None:
        """Write dz of columns to ``dz``, columns of ``room``; add the row sum of the unrounded dz to dbias.

        The logits of these columns are all kept (``block.kept_part``), or none of them.
        """

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to ``out[rows, D]``, or add it if ``continues``."""

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to ``out[piece, D]`` in its dtype, or add it if ``continues``; 16 rows per step."""


def gradients(
    steps: Steps,
    inputs: Inputs,
    upstream: rowwise.LogpUpstream,
    vocab_segments: int,
    partial: bool,
    workspace_mib: int | None,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
    bias_total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty if not needed.

    With ``partial`` that of hidden is the sum over this shard in the compute dtype, not rounded. With ``main_grad``
    that of the weight is added to it, and comes back empty, as that of the bias with ``bias_total``.
    """
    count, dtype = inputs.hidden.shape[0], rowwise.compute_dtype(inputs.hidden.dtype)
    workspace = default_workspace(inputs.hidden) if workspace_mib is None else workspace_mib << 20
    if needed[1]:
        inputs, workspace = _cleaned(inputs, workspace)
    hidden, weight = inputs.hidden, inputs.weight
    first = hidden.new_empty(hidden.shape if needed[0] else 0, dtype=dtype)
    tree, segments = Tree(first), _segments(inputs, vocab_segments) if count else []
    dweight = weight.new_empty(weight.shape if needed[1] and main_grad is None else 0)
    dbias = bias_total
    if dbias is None:
        dbias = hidden.new_zeros(weight.shape[0] if needed[2] else 0, dtype=dtype)
    if segments:
        longest = inputs._replace(weight=weight[segments[0]])
        piece, height = steps.cut(longest, workspace - first.nbytes, needed)
        loop = _Loop(steps, inputs, upstream, height, needed, dweight, main_grad, dbias)
        for segment in segments:
            chain = tree.buffer()
            loop.walk(segment, piece, chain)
            if segment is segments[-1] and vocab_segments > 1 and _are_some_empty(inputs.vocab):
                # An empty segment is +0, so a sum with it is never -0.
                chain += 0.0
            tree.add(chain)
    else:
        dweight.zero_()
    dhidden = tree.total()
    if needed[0] and inputs.ignore_index is not None:
        # dz of ignored rows is 0, but 0 times a weight of NaN or inf is NaN.
        dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
    dbias = dbias.to(hidden.dtype) if needed[2] and bias_total is None else hidden.new_empty(0)
    return dhidden if partial else dhidden.to(hidden.dtype), dweight, dbias


class _Loop(NamedTuple):
    """What the loop over a segment reads and writes."""

    steps: Steps
    inputs: Inputs
    upstream: rowwise.LogpUpstream
    height: int
    needed: Sequence[bool]
    dweight: torch.Tensor
    main_grad: torch.Tensor | None
    dbias: torch.Tensor

    def walk(self, segment: slice, piece: int, dhidden: torch.Tensor) -> None:
        """Write the chain of dH over a segment to ``dhidden``, and the segment's rows of dW and dbias."""
        for part in slices(segment.stop - segment.start, piece):
            columns = slice(segment.start + part.start, segment.start + part.stop)
            self._piece(columns, dhidden, continues=part.start > 0)

    def _piece(self, columns: slice, dhidden: torch.Tensor, *, continues: bool) -> None:
        inputs, count, main_grad = self.inputs, self.inputs.hidden.shape[0], self.main_grad
        total = None
        if self.needed[1]:
            total = _weight_total(self.dweight, main_grad, columns, in_blocks=self.height < count)
        for rows in slices(count, self.height):
            dz = self._dlogits(rows, columns)
            if self.needed[0]:
                self.steps.add_dhidden(dz, _part(inputs.weight, columns), _part(dhidden, rows), continues=continues)
            if total is not None:
                in_turn = rows.start > 0 or main_grad is not None
                self.steps.add_dweight(dz, _part(inputs.hidden, rows), total, continues=in_turn)
            # Free dz before the next one is allocated.
            del dz
        if total is not None and main_grad is None and total.dtype != self.dweight.dtype:
            self.dweight[columns] = total

    def _dlogits(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return dz of a piece: first of the logits that are formed, then of those that are kept."""
        block, upstream = self.inputs.block(rows), self.upstream.rows(rows)
        dz = self.steps.room(block.hidden, columns.stop - columns.start)
        kept = min(max(self.inputs.first_kept, columns.start), columns.stop)
        for first, end in ((columns.start, kept), (kept, columns.stop)):
            if first < end:
                dbias = self.dbias[first:end] if self.needed[2] else None
                part = dz[:, first - columns.start : end - columns.start]
                self.steps.dlogits(block, upstream, slice(first, end), dbias, part)
        return dz


def _part(x: torch.Tensor, part: slice) -> torch.Tensor:
    """Return some rows of ``x``; all of them without a view, which costs host time."""
    return x if part.start == 0 and part.stop == x.shape[0] else x[part]


def _segments(inputs: Inputs, number: int) -> list[slice]:
    """Return the segments of the vocabulary in this shard that are not empty, counted from its first column."""
    here = inputs.weight.shape[0]
    bounds = vocab_shards(inputs.vocab, number) if number > 1 else ((inputs.start, inputs.start + here),)
    found = [slice(first - inputs.start, last - inputs.start) for first, last in bounds]
    return [part for part in found if 0 <= part.start < part.stop <= here]


def _are_some_empty(vocab: int) -> bool:
    first, last = vocab_shards(vocab, SEGMENTS)[-1]
    return first == last


def _cleaned(inputs: Inputs, workspace: int) -> tuple[Inputs, int]:
    """Return the inputs with ignored rows of hidden zeroed, and the workspace bytes that remain."""
    if inputs.ignore_index is None:
        return inputs, workspace
    hidden = inputs.keep(inputs.hidden)
    return inputs._replace(hidden=hidden), workspace - hidden.nbytes


def _weight_total(
    dweight: torch.Tensor, main_grad: torch.Tensor | None, columns: slice, *, in_blocks: bool
) -> torch.Tensor:
    """Return the buffer that sums a piece of dW: main_grad, dW itself if one block completes it, or a wider one."""
    if main_grad is not None:
        return main_grad[columns]
    total, dtype = dweight[columns], rowwise.compute_dtype(dweight.dtype)
    return torch.empty_like(total, dtype=dtype) if in_blocks and dtype != total.dtype else total
