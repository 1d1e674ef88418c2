"""The passes of ``linear_logp_loss``: losses of chunks, and gradients that are computed as soon as a chunk's loss is.

::

    for chunk in chunks:                    whole sequences
        logp = forward of its rows
        losses = loss(logp, chunk) -> gradient of logp
        dH[rows] = backward;  dW, dbias += backward

Chains over tokens (dW, dbias) may be cut at multiples of 16, 128 or ``join_tokens`` tokens alone. So backward leaves
the last rows of a chunk to the next one, which recomputes their logits: rows are independent, so these are the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from rl_kernels.core import validate as check
from rl_kernels.core.constants import BIAS_STEP, STEP
from rl_kernels.core.min_logit import is_below
from rl_kernels.core.outputs import LogpStats
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.core.saved import are_hooked
from rl_kernels.linear_logp.arguments import WHOLE, Call, Operands
from rl_kernels.linear_logp.autograd import arguments_of_backward, backward_op, check_targets, forward
from rl_kernels.linear_logp.inputs import part_of


class Chunk(NamedTuple):
    """The sequences whose loss is asked for.

    Attributes:
        sequences: their numbers in the batch.
        tokens: their tokens, of all tokens of the batch.
        cu_seqlens: ``[S + 1]``, int32, on the device of hidden: offsets of the S sequences, from 0 on.
        max_seqlen: tokens of the longest one.
    """

    sequences: slice
    tokens: slice
    cu_seqlens: torch.Tensor
    max_seqlen: int


def offsets_of(cu_seqlens: torch.Tensor | Sequence[int] | None, leading: Sequence[int]) -> list[int]:
    """Return the offsets of all sequences; without ``cu_seqlens`` each row of ``leading`` dims ``[B, T]`` is one.

    Raises:
        TypeError, ValueError: they are not offsets of all tokens.
    """
    if cu_seqlens is None:
        if len(leading) != 2:
            raise ValueError("cu_seqlens: expected offsets, or hidden of [B, T, D] without them")
        return [row * leading[1] for row in range(leading[0] + 1)]
    if len(leading) != 1:
        raise ValueError(f"cu_seqlens: expected hidden of [N, D] with offsets, got {len(leading) + 1} dims")
    if isinstance(cu_seqlens, torch.Tensor):
        check.tensor("cu_seqlens", cu_seqlens, check.INTEGERS, ndim=1)
        cu_seqlens = cu_seqlens.tolist()
    elif not isinstance(cu_seqlens, Sequence):
        raise TypeError(f"cu_seqlens: expected a tensor or a sequence of integers, got {type(cu_seqlens).__name__}")
    offsets = list(cu_seqlens)
    for offset in offsets:
        check.integer("cu_seqlens", offset, least=0)
    if not offsets or offsets[0] or offsets[-1] != leading[0] or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens: expected offsets that rise from 0 to the number of tokens, {leading[0]}")
    return offsets


def chunks_of(
    offsets: Sequence[int], chunk_tokens: int, device: torch.device, length: int | None = None
) -> Iterator[Chunk]:
    """Yield chunks of as many sequences as have at most ``chunk_tokens`` tokens; a longer one is a chunk of its own.

    An empty sequence is in the chunk of a neighbor: a chunk has no tokens only if the batch has none.

    Args:
        offsets: of all sequences.
        chunk_tokens: most tokens of a chunk.
        device: of the chunks' ``cu_seqlens``.
        length: tokens of each sequence if all have as many: then nothing is copied to a GPU.
    """
    first = 0
    while first < len(offsets) - 1:
        last = first + 1
        while last < len(offsets) - 1:
            are_empty = offsets[last] in (offsets[first], offsets[last + 1])
            if not are_empty and offsets[last + 1] - offsets[first] > chunk_tokens:
                break
            last += 1
        own = [offset - offsets[first] for offset in offsets[first : last + 1]]
        longest = max(b - a for a, b in pairwise(own))
        if length is None:
            cu_seqlens = torch.tensor(own, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        else:
            cu_seqlens = torch.arange(len(own), dtype=torch.int32, device=device) * length
        yield Chunk(slice(first, last), slice(offsets[first], offsets[last]), cu_seqlens, longest)
        first = last


def rows_of(chunk: Chunk, total: int, step: int) -> tuple[int, int, int]:
    """Return the rows of a chunk's passes: the first row of both, the end of the backward and of the forward pass.

    Rows that the last chunk could not complete are recomputed, so that backward passes meet at multiples of ``step``,
    of ``total`` rows.
    """
    start, end = chunk.tokens.start, chunk.tokens.stop
    return start // step * step, end if end == total else end // step * step, end


Loss = Callable[[Any, Chunk], torch.Tensor]
"""``(logp or LogpStats, chunk) -> losses[S]``, of S sequences."""
Gradients = list["torch.Tensor | None"]


class ChunkedLoss:
    """A call of ``linear_logp_loss``, and the gradients of hidden, weight and bias that its chunks add to.

    Args:
        operands: hidden states, weight and bias.
        call: the other arguments.
        loss: the callable.
        chunks: what it is called with.
        length: T of sequences that are rows of ``[B, T]``, or None if they are packed.
        grad_scale: the upstream gradient.
        is_checked: whether the values of tensors may be read.
    """

    def __init__(
        self,
        operands: Operands,
        call: Call,
        loss: Loss,
        chunks: tuple[Chunk, ...],
        length: int | None,
        grad_scale: float,
        is_checked: bool,
    ) -> None:
        self._operands, self._call, self._loss, self._chunks, self._length = operands, call, loss, chunks, length
        self._grad_scale, self._is_checked = grad_scale, is_checked
        self._dtype, self._results = compute_dtype(operands[0].dtype), 3 if call.has_stats else 1
        self._needed = [value is not None and value.requires_grad for value in operands]

    @torch.no_grad()
    def losses(self) -> torch.Tensor:
        """Return the sum of all losses."""
        return self._sum([self._of_chunk(one, self._forward(one.tokens, 0)[: self._results]) for one in self._chunks])

    @torch.no_grad()
    def with_gradients(self) -> tuple[torch.Tensor, Gradients]:
        """Return the sum of all losses, and the gradients of hidden, weight and bias; None for one not needed."""
        (hidden, weight, _), needed = self._operands, self._needed
        upstream = [hidden.new_empty(len(hidden), dtype=self._dtype) for _ in range(self._results)]
        self._dhidden = torch.empty_like(hidden) if needed[0] else None
        # One chunk gives the gradients of weight and bias in the dtype of the inputs; several are added to totals.
        self._main_grad, self._dweight, self._bias_total, self._dbias = self._call.main_grad, None, None, None
        if len(self._chunks) != 1 and needed[1] and self._main_grad is None:
            self._main_grad = weight.new_zeros(weight.shape, dtype=self._dtype)
        if len(self._chunks) != 1 and needed[2]:
            self._bias_total = weight.new_zeros(len(weight), dtype=self._dtype)
        losses = self._sum([self._chunk_losses(chunk, upstream) for chunk in self._chunks])
        dweight = self._dweight if self._main_grad is None else self._main_grad.to(hidden.dtype)
        dbias = self._dbias if self._bias_total is None else self._bias_total.to(hidden.dtype)
        gradients = self._dhidden, dweight if self._call.main_grad is None else None, dbias
        return losses, [value if is_needed else None for value, is_needed in zip(gradients, needed, strict=True)]

    def _chunk_losses(self, chunk: Chunk, upstream: list[torch.Tensor]) -> torch.Tensor:
        """Return the losses of a chunk, and add its gradients; its logits are freed at the end."""
        call, (hidden, weight, bias) = self._call, self._operands
        step = call.join_tokens or (BIAS_STEP if self._needed[2] else STEP)
        start, stop, end = rows_of(chunk, len(hidden), step)
        *results, norm, kept = self._forward(slice(start, end), WHOLE if call.saved_mib is None else call.saved_mib)
        losses = self._differentiated(chunk, [value[chunk.tokens.start - start :] for value in results], upstream)
        if start == stop and len(hidden):
            return losses
        # norm, entropy and kept may have more rows than the backward pass.
        here, count, part = slice(start, stop), stop - start, call.of_rows(slice(start, stop), 0)
        inputs = (
            hidden[here],
            weight,
            part.target_ids,
            bias,
            part.temperature,
            call.ignore_index,
            call.cap,
            part.min_logit,
        )
        logits = part_of(kept, slice(0, count)) if kept.shape[1] else None
        saved = norm[:count], results[2][:count] if call.has_stats else None, logits
        grads = [value[here] for value in upstream]
        # With a halo an op has a part of the logits, and does not own them.
        limits = call.workspace_mib, self._needed, call.join_tokens, call.halo is None
        arguments = arguments_of_backward(inputs, saved, grads, call.shard, limits)
        totals, backend = (self._main_grad, self._bias_total), call.ready.backend
        over = call.shard.group, call.halo, hidden.dtype
        if totals == (None, None):
            op, *first = backward_op("backward", *over)
            dhidden, self._dweight, self._dbias = op(*first, *arguments, backend)
        else:
            op, *first = backward_op("backward_main_grad", *over)
            dhidden, self._dbias = op(*first, *arguments, *totals, backend)
        if self._dhidden is not None:
            self._dhidden[here] = dhidden
        return losses

    def _forward(self, rows: slice, saved_mib: int | None) -> tuple[torch.Tensor, ...]:
        call, operands = self._call.of_rows(rows, saved_mib), (self._operands[0][rows], *self._operands[1:])
        results = forward(*operands, call)
        if self._is_checked:
            check_targets(operands, call, results[0])
        return results

    def _differentiated(self, chunk: Chunk, results: list[torch.Tensor], upstream: list[torch.Tensor]) -> torch.Tensor:
        """Return the losses of a chunk, and write the gradients of its statistics to their rows of ``upstream``."""
        leaves = [value.detach().requires_grad_() for value in results]
        with torch.enable_grad(), _plainly_saved():
            losses = self._of_chunk(chunk, leaves)
        if self._is_checked:
            _check_leaves(losses, leaves)
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
        if losses.requires_grad and len(losses):
            scale = torch.full_like(losses, self._grad_scale)
            grads = torch.autograd.grad(losses, leaves, scale, allow_unused=True)
        for into, grad in zip(upstream, grads, strict=True):
            into[chunk.tokens] = 0.0 if grad is None else grad
        if self._call.min_logit is not None:
            upstream[0][chunk.tokens].masked_fill_(is_below(results[0], self._call.min_logit[chunk.tokens]), 0.0)
        return losses.detach()

    def _of_chunk(self, chunk: Chunk, results: Any) -> torch.Tensor:
        """Call the loss with the statistics of a chunk's tokens, and check what it returns."""
        count = chunk.sequences.stop - chunk.sequences.start
        shaped = [value if self._length is None else value.view(count, self._length) for value in results]
        losses = self._loss(LogpStats(*shaped) if self._call.has_stats else shaped[0], chunk)
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point():
            kind = f"dtype {losses.dtype}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise TypeError(f"loss: expected it to return a tensor of floats, got {kind}")
        if losses.shape != (count,):
            raise ValueError(f"loss: expected one number for each of {count} sequences, got {tuple(losses.shape)}")
        if losses.device != shaped[0].device:
            raise ValueError(f"loss: expected device {shaped[0].device}, got {losses.device}")
        return losses.to(self._dtype)

    def _sum(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return row_sum(torch.cat(losses)) if losses else self._operands[0].new_zeros((), dtype=self._dtype)


def _plainly_saved() -> AbstractContextManager[Any]:
    """Keep hooks on saved tensors from the graph of a loss, which is freed at once: a checkpoint would run again."""
    return saved_tensors_hooks(lambda x: x, lambda x: x) if are_hooked() else nullcontext()


def _check_leaves(losses: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Refuse losses that depend on other tensors that require grad: their gradients would be lost."""
    nodes, visited = [losses.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not own for own in leaves):
            raise ValueError(
                f"loss: expected no other tensor that requires grad, found one of shape {tuple(leaf.shape)}; its "
                "gradient would be lost: detach it"
            )
        nodes += [following for following, _ in node.next_functions]
