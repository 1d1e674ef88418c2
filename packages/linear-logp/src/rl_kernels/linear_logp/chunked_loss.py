"""The passes of ``linear_logp_loss``: losses of chunks, and gradients that are formed as soon as a chunk's loss is.

::

    for chunk in chunks:                    whole sequences
        logp = forward of its rows
        losses = loss(logp, chunk) -> gradient of logp
        dH[rows] = backward;  dW, dbias += backward

Chains over tokens (dW, dbias) may be cut at multiples of 16, 128 or ``join_tokens`` tokens alone. So backward leaves
the last rows of a chunk to the next one, which forms their logits again: rows are independent, so these are the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from rl_kernels.core.constants import BIAS_STEP, STEP
from rl_kernels.core.outputs import LogpStats
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.core.saved import are_hooked
from rl_kernels.linear_logp.arguments import Call, Operands
from rl_kernels.linear_logp.autograd import forward
from rl_kernels.linear_logp.chunks import Chunk, Rows
from rl_kernels.linear_logp.shard import summed

Loss = Callable[[Any, Chunk], torch.Tensor]
"""``(logp or LogpStats, chunk) -> losses[S]``, of S sequences."""
WHOLE = 1 << 30
"""MiB that no chunk's logits take."""
Gradients = list[torch.Tensor | None]


class ChunkedLoss(NamedTuple):
    """A call of ``linear_logp_loss``.

    Attributes:
        operands: hidden states, weight and bias.
        call: the other arguments.
        loss: the callable.
        chunks: what it is called with.
        length: T of sequences that are rows of ``[B, T]``, or None if they are packed.
        grad_scale: the upstream gradient.
        is_checked: whether the values of tensors may be read.
    """

    operands: Operands
    call: Call
    loss: Loss
    chunks: tuple[Chunk, ...]
    length: int | None
    grad_scale: float
    is_checked: bool

    @torch.no_grad()
    def losses(self) -> torch.Tensor:
        """Return the sum of all losses."""
        losses = []
        for chunk in self.chunks:
            results = self._forward(chunk.tokens, 0)[: 3 if self.call.has_stats else 1]
            losses.append(self._of_chunk(chunk, results))
        return self._sum(losses)

    @torch.no_grad()
    def with_gradients(self) -> tuple[torch.Tensor, Gradients]:
        """Return the sum of all losses, and the gradients of hidden, weight and bias; None for one not needed."""
        hidden = self.operands[0]
        totals = _Totals(self, single=len(self.chunks) == 1)
        upstream = [hidden.new_empty(len(hidden), dtype=self._dtype) for _ in range(3 if self.call.has_stats else 1)]
        losses = [self._chunk_losses(chunk, totals, upstream) for chunk in self.chunks]
        return self._sum(losses), totals.gradients()

    def _chunk_losses(self, chunk: Chunk, totals: _Totals, upstream: list[torch.Tensor]) -> torch.Tensor:
        """Return the losses of a chunk, and add its gradients to the totals; its logits are freed at the end."""
        hidden, _, bias = self.operands
        is_bias = bias is not None and bias.requires_grad
        step = self.call.join_tokens or (BIAS_STEP if is_bias else STEP)
        rows = Rows.of(chunk, len(hidden), step)
        saved_mib = WHOLE if self.call.saved_mib is None else self.call.saved_mib
        *results, norm, kept = self._forward(slice(rows.start, rows.end), saved_mib)
        own = [value[chunk.tokens.start - rows.start :] for value in results]
        losses = self._differentiated(chunk, own, upstream)
        if rows.start < rows.stop or not len(hidden):
            totals.add(rows, norm, results[2] if self.call.has_stats else None, kept, upstream)
        return losses

    @property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self.operands[0].dtype)

    def _forward(self, rows: slice, saved_mib: int | None) -> tuple[torch.Tensor, ...]:
        hidden, weight, bias = self.operands
        return forward(hidden[rows], weight, bias, self.call.of_rows(rows, saved_mib))

    def _differentiated(self, chunk: Chunk, results: list[torch.Tensor], upstream: list[torch.Tensor]) -> torch.Tensor:
        """Return the losses of a chunk, and write the gradients of its statistics to their rows of ``upstream``."""
        leaves = [value.detach().requires_grad_() for value in results]
        with torch.enable_grad(), _plainly_saved():
            losses = self._of_chunk(chunk, leaves)
        if self.is_checked:
            _check_leaves(losses, leaves)
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
        if losses.requires_grad and len(losses):
            scale = torch.full_like(losses, self.grad_scale)
            grads = torch.autograd.grad(losses, leaves, scale, allow_unused=True)
        for into, grad in zip(upstream, grads, strict=True):
            if grad is None:
                into[chunk.tokens] = 0.0
            else:
                into[chunk.tokens] = grad
        return losses.detach()

    def _of_chunk(self, chunk: Chunk, results: Any) -> torch.Tensor:
        """Call the loss with the statistics of a chunk's tokens, and check what it returns."""
        count = chunk.sequences.stop - chunk.sequences.start
        shaped = [value if self.length is None else value.view(count, self.length) for value in results]
        losses = self.loss(LogpStats(*shaped) if self.call.has_stats else shaped[0], chunk)
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point():
            raise TypeError(f"loss: expected it to return a tensor of floats, got {_kind(losses)}")
        if losses.shape != (count,):
            raise ValueError(f"loss: expected one number for each of {count} sequences, got {tuple(losses.shape)}")
        if losses.device != shaped[0].device:
            raise ValueError(f"loss: expected device {shaped[0].device}, got {losses.device}")
        return losses.to(self._dtype)

    def _sum(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return row_sum(torch.cat(losses)) if losses else self.operands[0].new_zeros((), dtype=self._dtype)


class _Totals:
    """The gradients of hidden, weight and bias, as far as chunks have added to them."""

    def __init__(self, loss: ChunkedLoss, *, single: bool) -> None:
        """Make room. ``single``: one chunk gives the gradients of weight and bias in the dtype of the inputs."""
        call, (hidden, weight, bias) = loss.call, loss.operands
        self._loss, self._dtype = loss, hidden.dtype
        self._needed = [value is not None and value.requires_grad for value in (hidden, weight, bias)]
        wide = compute_dtype(hidden.dtype)
        self._dhidden = torch.empty_like(hidden) if self._needed[0] else None
        self._main_grad, self._into_main_grad = call.main_grad, call.main_grad is not None
        self._bias_total = self._dweight = self._dbias = None
        if not single and self._needed[1] and call.main_grad is None:
            self._main_grad = weight.new_zeros(weight.shape, dtype=wide)
        if not single and self._needed[2]:
            self._bias_total = weight.new_zeros(len(weight), dtype=wide)

    def add(
        self,
        rows: Rows,
        norm: torch.Tensor,
        entropy: torch.Tensor | None,
        kept: torch.Tensor,
        upstream: list[torch.Tensor],
    ) -> None:
        """Add the gradients of rows. norm, entropy and kept may have more rows than the backward pass."""
        loss, here = self._loss, slice(rows.start, rows.stop)
        count, call, (hidden, weight, bias) = rows.stop - rows.start, loss.call.of_rows(here, 0), loss.operands
        (start, size, segments, group), backend = call.shard, call.ready.backend
        inputs = hidden[here], weight, call.target_ids, bias, call.temperature, call.ignore_index, call.cap
        grads = [value[here] for value in upstream] + [None] * (3 - len(upstream))
        saved = norm[:count], None if entropy is None else entropy[:count], kept[:count] if kept.shape[1] else None
        shard = start, size, segments, group is not None
        limits = call.workspace_mib, self._needed, call.join_tokens
        arguments = *inputs, *saved, *grads, *shard, *limits
        if self._main_grad is None and self._bias_total is None:
            op = summed("backward", group, self._dtype)
            dhidden, self._dweight, self._dbias = op(*arguments, backend)
        else:
            op = summed("backward_main_grad", group, self._dtype)
            dhidden, self._dbias = op(*arguments, self._main_grad, self._bias_total, backend)
        if self._dhidden is not None:
            self._dhidden[here] = dhidden

    def gradients(self) -> Gradients:
        """Return the gradients in the dtype of the inputs; None for one not needed, or added to ``main_grad``."""
        dweight = self._dweight if self._main_grad is None else self._main_grad.to(self._dtype)
        dbias = self._dbias if self._bias_total is None else self._bias_total.to(self._dtype)
        gradients = self._dhidden, None if self._into_main_grad else dweight, dbias
        return [gradient if is_needed else None for gradient, is_needed in zip(gradients, self._needed, strict=True)]


def _plainly_saved() -> AbstractContextManager[Any]:
    """Keep hooks on saved tensors from the graph of a loss, which is freed at once: a checkpoint would run again."""
    return saved_tensors_hooks(lambda x: x, lambda x: x) if are_hooked() else nullcontext()


def _kind(value: object) -> str:
    return f"dtype {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


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
