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

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from rl_kernels.core.rowwise.logp_gradient import LogpUpstream
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.inputs import Inputs, slices
from rl_kernels.linear_logp.sums import Sums, Totals
from rl_kernels.linear_logp.tree import Tree
from rl_kernels.linear_logp.vocabulary import SEGMENTS, vocab_shards

COLUMNS, MOST_ROWS, LEAST = 33792, 16384, 256 << 20
"""Of the default workspace: columns of dz, 256 for each of 132 multiprocessors; rows that count; and least bytes."""


def default_workspace(hidden: torch.Tensor) -> int:
    """Return bytes for the buffer of dH and for dz of pieces so wide that continuing dH costs little."""
    count, size = hidden.shape
    buffer = count * size * compute_dtype(hidden.dtype).itemsize
    return max(buffer + min(count, MOST_ROWS) * COLUMNS * hidden.itemsize, LEAST)


class Steps(Protocol):
    """The steps of a backend for one piece of the vocabulary and one block of rows."""

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool], buffers: int = 0) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes.

        ``inputs`` has the rows of the longest chain. ``buffers``: how many sums of a piece of dW lie beside them.
        """

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz ``[rows, width]``, in the dtype of the inputs."""

    def dlogits(
        self,
        block: Inputs,
        upstream: LogpUpstream,
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
    upstream: LogpUpstream,
    vocab_segments: int,
    partial: bool,
    workspace_mib: int | None,
    needed: Sequence[bool],
    join_tokens: int | None = None,
    main_grad: torch.Tensor | None = None,
    bias_total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty if not needed.

    With ``partial`` that of hidden is the sum over this shard in the compute dtype, not rounded. With ``main_grad``
    that of the weight is added to it, and comes back empty, as that of the bias with ``bias_total``.
    """
    count, dtype = inputs.hidden.shape[0], compute_dtype(inputs.hidden.dtype)
    workspace = default_workspace(inputs.hidden) if workspace_mib is None else workspace_mib << 20
    if needed[1]:
        inputs, workspace = _cleaned(inputs, workspace)
    hidden, weight = inputs.hidden, inputs.weight
    first = hidden.new_empty(hidden.shape if needed[0] else 0, dtype=dtype)
    tree, segments = Tree(first), _segments(inputs, vocab_segments) if count else []
    dweight = weight.new_empty(weight.shape if needed[1] and main_grad is None else 0)
    dbias = bias_total
    if dbias is None:
        dbias = hidden.new_zeros(weight.shape[0], dtype=dtype) if needed[2] else hidden.new_empty(0)
    if segments:
        totals = Totals.of(dweight, main_grad, dbias, needed, join_tokens)
        longest = inputs._replace(weight=weight[segments[0]]).block(slice(0, totals.rows_of_chain(count)))
        piece, height = steps.cut(longest, workspace - first.nbytes, needed, totals.buffers)
        loop = _Loop(steps, inputs, upstream, height, needed[0], totals)
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
    upstream: LogpUpstream
    height: int
    is_hidden_needed: bool
    totals: Totals

    def walk(self, segment: slice, piece: int, dhidden: torch.Tensor) -> None:
        """Write the chain of dH over a segment to ``dhidden``, and the segment's rows of dW and dbias."""
        for part in slices(segment.stop - segment.start, piece):
            columns = slice(segment.start + part.start, segment.start + part.stop)
            self._piece(columns, dhidden, continues=part.start > 0)

    def _piece(self, columns: slice, dhidden: torch.Tensor, *, continues: bool) -> None:
        count = self.inputs.hidden.shape[0]
        total = self.totals.piece(columns, in_blocks=self.height < count)
        if self.totals.join_tokens is None:
            self._chain(slice(0, count), columns, total, dhidden, continues=continues)
        else:
            chain = total.room()
            for rows in slices(count, self.totals.join_tokens):
                chain.begin()
                self._chain(rows, columns, chain, dhidden, continues=continues)
                total.add(chain)
        self.totals.finish(columns, total)

    def _chain(self, chain: slice, columns: slice, sums: Sums, dhidden: torch.Tensor, *, continues: bool) -> None:
        """Add the terms of rows to the sums of a piece, and write or continue their dH."""
        hidden, weight = self.inputs.hidden, self.inputs.weight
        for part in slices(chain.stop - chain.start, self.height):
            rows = slice(chain.start + part.start, chain.start + part.stop)
            dz = self._dlogits(rows, columns, sums.bias)
            if self.is_hidden_needed:
                self.steps.add_dhidden(dz, _part(weight, columns), _part(dhidden, rows), continues=continues)
            if sums.weight is not None:
                in_turn = part.start > 0 or sums.is_begun
                self.steps.add_dweight(dz, _part(hidden, rows), sums.weight, continues=in_turn)
            # Free dz before the next one is allocated.
            del dz

    def _dlogits(self, rows: slice, columns: slice, dbias: torch.Tensor | None) -> torch.Tensor:
        """Return dz of a piece: first of the logits that are formed, then of those that are kept."""
        block = self.inputs.block(rows)
        upstream = self.upstream if block is self.inputs else self.upstream.rows(rows)
        dz = self.steps.room(block.hidden, columns.stop - columns.start)
        kept = min(max(self.inputs.first_kept, columns.start), columns.stop)
        for first, end in ((columns.start, kept), (kept, columns.stop)):
            if first < end:
                here = slice(first - columns.start, end - columns.start)
                of_bias = None if dbias is None else _part(dbias, here)
                self.steps.dlogits(block, upstream, slice(first, end), of_bias, dz[:, here])
        return dz


def _part(x: torch.Tensor, part: slice) -> torch.Tensor:
    """Return some rows of ``x``; all of them without a view, which costs host time."""
    return x if part.start == 0 and part.stop == x.shape[0] else x[part]


def _segments(inputs: Inputs, number: int) -> list[slice]:
    """Return the segments of the vocabulary in this shard that are not empty, counted from its first column."""
    here = inputs.weight.shape[0]
    bounds = vocab_shards(inputs.vocab, number) if number > 1 else ((inputs.start, inputs.start + here),)
    parts = [slice(first - inputs.start, last - inputs.start) for first, last in bounds]
    return [part for part in parts if 0 <= part.start < part.stop <= here]


def _are_some_empty(vocab: int) -> bool:
    first, last = vocab_shards(vocab, SEGMENTS)[-1]
    return first == last


def _cleaned(inputs: Inputs, workspace: int) -> tuple[Inputs, int]:
    """Return the inputs with ignored rows of hidden zeroed, and the workspace bytes that remain."""
    if inputs.ignore_index is None:
        return inputs, workspace
    hidden = inputs.keep(inputs.hidden)
    return inputs._replace(hidden=hidden), workspace - hidden.nbytes
