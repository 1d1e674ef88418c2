"""linear_logp in PyTorch: pieces of the vocabulary for blocks of rows, every sum in a fixed order.

Reduction order, which is the contract of this backend on the CPU: the vocabulary is cut into units of 1024 columns.
Logits are products in FP32 (``rl_kernels.core.products``). Each unit gives a softmax state; the states are merged in
ascending order. dH adds one product in FP32 per unit, in ascending order; dW adds 16 tokens per step. On a GPU the
products come from the vendor library, so bits may depend on the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rl_kernels.core import products
from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.constants import FAN, UNIT
from rl_kernels.core.rowwise import softmax
from rl_kernels.core.rowwise.ids import outside, select
from rl_kernels.core.rowwise.logp_gradient import LogpUpstream, dlogits
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.softmax import SoftmaxState, below, merge, per_row, softmax_state
from rl_kernels.core.scratch import Scratch
from rl_kernels.linear_logp import backward as loop
from rl_kernels.linear_logp import kept_columns
from rl_kernels.linear_logp.backward import Backward, Dlogits, Product
from rl_kernels.linear_logp.drawing import Request, draw
from rl_kernels.linear_logp.inputs import Inputs, inputs_of, kept_room, packed_room, slices, unpacked

BLOCK = 64
"""Rows of a block are a multiple of it, so that no step of dW is cut."""
GAP = 16
"""Elements between rows of logits: to rows at multiples of 4096 bytes, which share few lines of the cache, a product is
written more slowly than it is copied there."""
BLOCK_ELEMENTS = 1 << 20
"""Logits that the forward pass processes at once. Rows are independent, so this changes no bit."""
_logits_room, _gradient_room, _wide_room = Scratch(), Scratch(), Scratch()


def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (logp, norm, kept), ``[N]``, ``[N, 2]`` and ``[N, width]``."""
    (logp, norm), logits = _statistics(*arguments, entropy=False)
    return logp, norm, logits


def forward_stats(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (logp, logsumexp, entropy, norm, kept), the first three ``[N]``, then ``[N, 2]`` and ``[N, width]``."""
    (logp, norm, lse, entropy), logits = _statistics(*arguments, entropy=True)
    return logp, lse, entropy, norm, logits


forward_columns = functools.partial(kept_columns.statistics, forward)


def states(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed states and selected logits of a shard of the vocabulary, and its kept logits."""
    hidden, weight, *_, vocab_start, slots, entropy, saved_mib = args
    logits = kept_room(hidden, weight.shape[0], saved_mib)
    inputs = inputs_of(args[:8], kept=logits, start=vocab_start)
    packed, parts, chosen = packed_room(hidden, slots, entropy=entropy)
    for rows in _blocks(inputs):
        for unit, state in enumerate(_walk(inputs.block(rows), chosen[rows], entropy=entropy)):
            for number, value in enumerate(state):
                if value is not None:
                    parts[unit, number, rows] = value
    return packed, logits


def finish(
    gathered: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    vocab_size: int,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm) from the packed states of all shards; two are empty if not wanted."""
    parts, chosen = unpacked(gathered, target_ids, vocab_size, entropy=entropy)
    scale = per_row(temperature, chosen)
    each = (SoftmaxState(top, total, weighted if entropy else None) for top, total, weighted in parts)
    inputs = Inputs(gathered, gathered, target_ids, None, temperature, ignore_index, None, vocab=vocab_size)
    logp, norm, *stats = _results(inputs, _merged(each, scale), chosen, scale)
    lse, row_entropy = stats or [gathered.new_empty(0), gathered.new_empty(0)]
    return logp, lse, row_entropy, norm


def sample(logits: torch.Tensor, norm: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Return ids, their log-probabilities over the kept and over all entries, and min_logit."""
    drawn = draw(logits, norm, Request(*rest[:-1]))
    # The logits stand for hidden states; of the weight only the number of rows is read.
    inputs = Inputs(logits, logits.t(), drawn.ids, None, drawn.temperature, None, None, vocab=logits.shape[1])
    return drawn.ids, _logp_of(inputs._replace(min_logit=drawn.min_logit)), _logp_of(inputs), drawn.min_logit


def _logp_of(inputs: Inputs) -> torch.Tensor:
    return torch.cat([_block_statistics(inputs.block(rows), entropy=False, given=True)[0] for rows in _blocks(inputs)])


@prepared
def backward(*args: Any) -> Launches:
    """Return the gradients of hidden, weight and bias, or with totals those of hidden and bias; empty if not needed."""
    return Backward(Steps(), *args)


backward_main_grad = backward


def _statistics(*args: Any, entropy: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return logp and norm, with entropy also logsumexp and entropy; and the logits that are kept."""
    hidden, weight, *_, saved_mib = args
    logits, results = kept_room(hidden, weight.shape[0], saved_mib), []
    inputs = inputs_of(args[:8], kept=logits, vocab=len(weight))
    for rows in _blocks(inputs):
        results.append(_block_statistics(inputs.block(rows), entropy=entropy))
    return results[0] if len(results) == 1 else [torch.cat(parts) for parts in zip(*results, strict=True)], logits


def _block_statistics(block: Inputs, *, entropy: bool, given: bool = False) -> list[torch.Tensor]:
    """Return the statistics of a block of rows, whose hidden states are the logits if they are ``given``."""
    scale = per_row(block.temperature, block.hidden)
    chosen = block.hidden.new_zeros(block.hidden.shape[0], dtype=compute_dtype(block.hidden.dtype))
    state = _merged(_walk(block, chosen, entropy=entropy, given=given), scale)
    return _results(block, state, chosen, scale)


def _blocks(inputs: Inputs) -> Iterator[slice]:
    """Cut the rows into blocks: at least one, which may be empty."""
    count, size = inputs.hidden.shape
    return slices(max(count, 1), max(BLOCK_ELEMENTS // max(UNIT, size), BLOCK))


def _walk(block: Inputs, chosen: torch.Tensor, *, entropy: bool, given: bool = False) -> Iterator[SoftmaxState]:
    """Yield the softmax states of each unit; add the logit that a row selects to ``chosen[N]``, and keep logits."""
    count, scale = block.hidden.shape[0], per_row(block.temperature, block.hidden)
    for columns in slices(block.weight.shape[0], UNIT):
        width = columns.stop - columns.start
        padded = -(-width // FAN) * FAN
        # A row's sum is of whole fans: entries of -inf add nothing, and fill the last one.
        x = _logits_room(block.hidden, (count, padded + GAP), chosen.dtype)[:, :padded]
        if padded > width:
            x[:, width:].fill_(-torch.inf)
        logits = x[:, :width].copy_(block.hidden[:, columns]) if given else _logits(block, columns, x[:, :width])
        kept = block.kept_part(slice(columns.start, columns.start + padded))
        if kept is not None:
            kept.copy_(x)
        if block.min_logit is not None:
            logits.masked_fill_(below(logits, scale, block.min_logit), -torch.inf)
        chosen += select(logits, block.target_ids, block.start + columns.start)
        # Without gaps, because exp takes half as long there.
        yield softmax_state(x, scale, entropy=entropy, out=_wide_room(x, x.shape, x.dtype))


def _merged(states: Iterable[SoftmaxState], scale: torch.Tensor | None) -> SoftmaxState:
    """Return the state of all units, merged in ascending order."""
    return functools.reduce(lambda left, right: merge(left, right, scale), states)


def _results(
    block: Inputs, state: SoftmaxState, chosen: torch.Tensor, scale: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return logp and norm, and with entropy logsumexp and entropy; 0 at ignored positions."""
    softmax_state = softmax.finish(state, scale)
    # Of an id out of range logp and, through norm, gradients are NaN. All NaN have the same bits.
    norm = softmax_state.norm.masked_fill_(outside(block.target_ids, block.vocab)[:, None], torch.nan)
    logp = softmax_state.logp(chosen, scale)
    values = [logp.masked_fill_(logp.isnan(), torch.nan), norm]
    if softmax_state.logsumexp is not None and softmax_state.entropy is not None:
        values += [softmax_state.logsumexp, softmax_state.entropy]
    return [block.keep(value) for value in values]


def _logits(block: Inputs, columns: slice, out: torch.Tensor) -> torch.Tensor:
    """Write columns of ``hidden @ weight^T + bias`` to ``out``, capped, before the temperature; both passes call it."""
    x = products.matmul(block.hidden, block.weight[columns].t(), out=out)
    if block.bias is not None:
        x += block.bias[columns].to(x.dtype)
    return x if block.cap is None else block.cap(x)


class Steps(loop.Steps):
    """One piece of the vocabulary for one block of rows of the backward pass; nothing is prepared."""

    def begin(self, args: Any) -> Inputs:
        """Return the inputs as they are."""
        return inputs_of(args[:16])

    def room(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """Return room for dz."""
        return _gradient_room(hidden, (hidden.shape[0], width), hidden.dtype)

    def cut(
        self, hidden: torch.Tensor, columns: int, workspace: int, needed: Sequence[bool], buffers: int = 0
    ) -> tuple[int, int]:
        """Return (piece, height): a piece is a unit; the height is a multiple of 64, at least 64.

        The workspace holds a copy of a piece of the weight, its dW total, ``buffers`` like it, and per row a few
        temporaries the size of its logits.
        """
        size, item = hidden.shape[1], compute_dtype(hidden.dtype).itemsize
        height = (workspace - UNIT * size * item * (2 + buffers)) // (item * (8 * UNIT + 2 * size))
        return UNIT, max(height // BLOCK, 1) * BLOCK

    def dlogits(self, block: Inputs, columns: slice, dbias: torch.Tensor | None, dz: torch.Tensor) -> Dlogits:
        """Write dz, rounded, and add its row sum to dbias."""
        return functools.partial(_dlogits, columns)

    def dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz @ weight`` to ``out``, or add it if ``continues``."""
        return _added_product if continues else _product

    def dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> Product:
        """Write ``dz^T @ hidden`` to ``out``, or add it if ``continues``."""
        return products.chain_dw if continues else products.write_dw


def _dlogits(columns: slice, block: Inputs, dbias: torch.Tensor | None, dz: torch.Tensor) -> None:
    x = block.kept_part(columns)
    if x is None:
        x = _logits(block, columns, _logits_room(dz, dz.shape, compute_dtype(dz.dtype)))
    room = dz if dz.dtype == x.dtype else _wide_room(dz, dz.shape, x.dtype)
    assert block.norm is not None
    upstream = LogpUpstream(block.target_ids, block.norm, block.entropy, *block[11:14])
    scale = per_row(block.temperature, x)
    gradient = dlogits(x, scale, upstream, block.start + columns.start, room)
    if block.cap is not None:
        gradient *= block.cap.slope(x)
    if block.min_logit is not None:
        gradient.masked_fill_(below(x, scale, block.min_logit) & ~block.norm[:, 1:].isnan(), 0.0)
    if block.ignore_index is not None:
        gradient.masked_fill_((block.target_ids == block.ignore_index)[:, None], 0.0)
    if dbias is not None:
        products.chain_dw(gradient, torch.ones_like(gradient[:, :1]), dbias[:, None])
    if gradient is not dz:
        dz.copy_(gradient)


def _product(dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    is_wide = out.dtype == compute_dtype(dz.dtype)
    product = products.matmul(dz, weight, out=out if is_wide else None)
    if not is_wide:
        out.copy_(product)


def _added_product(dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out += products.matmul(dz, weight)
