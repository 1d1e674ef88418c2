"""From arguments to results: agreement of ranks, the forward pass, and the autograd function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.linear_logp.arguments import Call, Operands, Options, call_of
from rl_kernels.linear_logp.known import Known, compare, draw, rows_to_check
from rl_kernels.linear_logp.op import ops
from rl_kernels.linear_logp.shard import forward_over_ranks, same_of, summed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

OF_ALL_RANKS = ("softcap", "logit_scale", "ignore_index", "return_stats", "check_rows", "join_tokens", "vocab_size")
"""Options that must be equal on all ranks."""


def agreed(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    process_group: ProcessGroup | DeviceMesh | None,
    options: Options,
) -> tuple[Operands, Call]:
    """Check the arguments; in a group of several ranks, also that the ranks agree, unless values are not checked.

    Raises:
        TypeError, ValueError: an argument is wrong on this rank or, if values are checked, on any.
    """
    tensors = hidden, lm_head_weight, target_ids, bias
    if process_group is None:
        return call_of(*tensors, None, options)
    # Imported here: PyTorch may be built without torch.distributed.
    from rl_kernels.core.distributed import agree_on_kind, group_of

    group = group_of(process_group)
    # Under torch.compile and graph capture values cannot be read.
    is_hidden = torch.compiler.is_compiling() or (isinstance(hidden, torch.Tensor) and values_hidden(hidden))
    if group.size() == 1 or not options.validate or is_hidden:
        return call_of(*tensors, group, options)
    error, found = None, None
    try:
        found = call_of(*tensors, group, options)
    except Exception as caught:
        # Whatever it is, the other ranks would wait for this one.
        error = caught
    options_of_all = {name: getattr(options, name) for name in OF_ALL_RANKS}
    kinds = (getattr(hidden, "dtype", None), getattr(target_ids, "dtype", None), getattr(hidden, "shape", (None,))[-1:])
    needs_gradient = torch.is_grad_enabled() and getattr(hidden, "requires_grad", False)
    kind = (
        "linear_logp",
        bias is None,
        options.known is None,
        needs_gradient,
        *map(str, (*options_of_all.values(), *kinds)),
    )

    def same() -> dict[str, object]:
        assert found is not None
        backend = found[1].ready.backend
        compared = {"bias": "none" if bias is None else "given", **options_of_all, "backend": backend}
        return same_of(hidden, target_ids, options.temperature, options.known, **compared)

    agree_on_kind("linear_logp", group, options.validate, kind, error, same)
    assert found is not None
    return found


def forward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, ...]:
    """Return (logp, norm, kept), or (logp, logsumexp, entropy, norm, kept) with ``has_stats``.

    All are of the whole vocabulary, except kept, the logits of this shard that are kept for backward. What is known is
    not computed, and then no logits are kept.
    """
    if call.known is not None:
        return call.known.results(hidden, return_stats=call.has_stats)
    if call.shard.group is not None:
        return forward_over_ranks(hidden, weight, bias, call)
    results: tuple[torch.Tensor, ...] = ops["forward_stats" if call.has_stats else "forward"].call(
        *(call.ready, hidden, weight, call.target_ids, bias, call.temperature, call.ignore_index, call.cap),
        call.saved_mib,
    )
    return results


@torch.no_grad()
def check_known(operands: Operands, call: Call, count: int) -> None:
    """Recompute ``count`` rows, and compare them with what is known; in a group all ranks do.

    Raises:
        BitsDiffer: a row differs.
    """
    hidden, weight, bias = operands
    if not count or not len(call.target_ids):
        return
    assert call.known is not None
    rows = rows_to_check(call.target_ids, call.ignore_index, count, draw(call.shard.group))
    has_stats = call.known.logsumexp is not None or call.known.entropy is not None
    logp, *stats, norm, _ = forward(hidden[rows], weight, bias, call.of_rows(rows, 0)._replace(has_stats=has_stats))
    compare(call.known, rows, Known(logp, norm, *stats))


class LinearLogp(torch.autograd.Function):
    """Saves the inputs, norm, entropy with ``has_stats``, and at most ``saved_mib`` of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, ...]:
        """Return logp, or the three statistics; what is known is not computed."""
        *results, norm, kept = forward(hidden, weight, bias, call)
        entropy = results[2] if call.has_stats else None
        tensors = hidden, weight, call.target_ids, bias, call.temperature, call.cap
        save(ctx, *tensors, norm, entropy, kept if kept.shape[1] else None)
        ctx.set_materialize_grads(False)
        # Not a saved tensor: other backward passes may add to the buffer before this one runs.
        ctx.main_grad = call.main_grad
        ctx.ignore_index, ctx.workspace_mib, ctx.join_tokens = call.ignore_index, call.workspace_mib, call.join_tokens
        ctx.shard, ctx.backend = call.shard, call.ready.backend
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
