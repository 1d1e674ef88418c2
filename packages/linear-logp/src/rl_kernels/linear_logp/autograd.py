"""The autograd function of linear_logp, and its forward pass over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for
from rl_kernels.linear_logp.inputs import slices
from rl_kernels.linear_logp.known import Known, compare, draw, rows_to_check
from rl_kernels.linear_logp.op import ops
from rl_kernels.linear_logp.shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rl_kernels.linear_logp.arguments import Prepared

ROWS = 16384
"""Rows whose states are exchanged at once: this bounds their memory."""


def forward(
    shard: Shard,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
    return_stats: bool,
    saved_mib: int | None,
    backend: str,
    known: Known | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (logp, norm, kept), or (logp, logsumexp, entropy, norm, kept) with ``return_stats``.

    All are of the whole vocabulary, except kept, the logits of this shard that are kept for backward. What is
    ``known``, of rows ``[N]``, is not computed, and then no logits are kept.
    """
    if known is not None:
        return known.results(hidden, return_stats=return_stats)
    if shard.group is None:
        op = ops["forward_stats" if return_stats else "forward"]
        results: tuple[torch.Tensor, ...] = op(
            hidden, weight, target_ids, bias, temperature, ignore_index, cap, saved_mib, backend
        )
        return results
    from rl_kernels.core.distributed import all_gather

    ranks = shard.group.size()
    slots = shard.slots(ranks)
    per_slice = []
    if saved_mib is None and hidden.shape[0] > ROWS:
        saved_mib = 0
    # At least one slice; only one if logits are kept, because joining those of several would copy them.
    count = max(hidden.shape[0], 1)
    for rows in slices(count, count if saved_mib or saved_mib is None else ROWS):
        ids, scale = target_ids[rows], temperature[rows] if temperature.ndim else temperature
        inputs = hidden[rows], weight, ids, bias, scale, ignore_index, cap
        packed, kept = ops["states"](*inputs, shard.start, slots, return_stats, saved_mib, backend)
        gathered = all_gather(packed, shard.group).unflatten(0, (ranks, -1))
        per_slice.append(ops["finish"](gathered, ids, scale, ignore_index, shard.size, return_stats, backend))
    logp, lse, entropy, norm = per_slice[0] if len(per_slice) == 1 else map(torch.cat, zip(*per_slice, strict=True))
    return (logp, lse, entropy, norm, kept) if return_stats else (logp, norm, kept)


@torch.no_grad()
def check_known(call: Prepared, count: int) -> None:
    """Form ``count`` rows again, and compare them with what is known; in a group all ranks do.

    Raises:
        BitsDiffer: a row differs.
    """
    hidden, weight, ids, bias, temperature, ignore_index, cap = call.inputs
    if not count or not len(ids):
        return
    assert call.known is not None
    has_stats = call.known.logsumexp is not None or call.known.entropy is not None
    rows = rows_to_check(ids, ignore_index, count, draw(call.shard.group))
    scale = temperature[rows] if temperature.ndim else temperature
    inputs = hidden[rows], weight, ids[rows], bias, scale, ignore_index, cap
    logp, *stats, norm, _ = forward(call.shard, *inputs, has_stats, 0, call.backend)
    compare(call.known, rows, Known(logp, norm, *stats))


def summed(name: str, group: ProcessGroup | None, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a raw op of the backward pass; in a group with the sum of the gradient of hidden over its ranks."""
    op = ops[name]
    if group is None:
        return op
    from rl_kernels.core.distributed import all_reduce

    def call(*args: Any) -> Any:
        partial, *gradients = op(*args)
        needed = args[-3 if name == "backward" else -5]
        return all_reduce(partial, group, dtype=dtype) if needed[0] else partial, *gradients

    call.__name__ = op.__name__
    return call


class LinearLogp(torch.autograd.Function):
    """Saves the inputs, norm, entropy with ``return_stats``, and at most ``saved_mib`` of the logits.

    What gets no gradient is one tuple, so that autograd does not inspect each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        without_gradient: tuple[Any, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Return logp, or the three statistics; what is known is not computed."""
        target_ids, temperature, ignore_index, cap, main_grad, workspace_mib, saved_mib, join_tokens, *rest = (
            without_gradient
        )
        return_stats, start, size, segments, group, backend, *known = rest
        inputs = (hidden, weight, target_ids, bias, temperature, ignore_index, cap)
        shard = Shard(start, size, segments, group)
        *results, norm, kept = forward(shard, *inputs, return_stats, saved_mib, backend, Known.given(*known))
        entropy = results[2] if return_stats else None
        save(ctx, *inputs[:5], cap, norm, entropy, kept if kept.shape[1] else None)
        ctx.set_materialize_grads(False)
        # Not a saved tensor: other backward passes may add to the buffer before this one runs.
        ctx.main_grad = main_grad
        ctx.ignore_index, ctx.workspace_mib, ctx.join_tokens = ignore_index, workspace_mib, join_tokens
        ctx.shard, ctx.backend = shard, backend
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the arguments that the pass under way asks for."""
        hidden, weight, target_ids, bias, temperature, cap, norm, entropy, kept = ctx.saved_tensors
        inputs = (hidden, weight, target_ids, bias, temperature, ctx.ignore_index, cap)
        saved = (norm, entropy, kept, *upstream, *[None] * (3 - len(upstream)))
        needed = [ctx.needs_input_grad[number] and is_asked_for(ctx, number) for number in range(3)]
        start, size, segments, group = ctx.shard
        limits = ctx.workspace_mib, needed, ctx.join_tokens
        arguments = (*inputs, *saved, start, size, segments, group is not None, *limits)
        if needed[1] and ctx.main_grad is not None:
            op = summed("backward_main_grad", group, hidden.dtype)
            dhidden, dbias = first_order(op, *arguments, ctx.main_grad, None, ctx.backend)
            dweight = None
        else:
            dhidden, dweight, dbias = first_order(summed("backward", group, hidden.dtype), *arguments, ctx.backend)
        gradients = [
            value if is_needed else None for value, is_needed in zip((dhidden, dweight, dbias), needed, strict=True)
        ]
        return *gradients, None
