"""From arguments to results: agreement of ranks, the forward pass alone and over ranks, and the autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_kernels.core import min_logit as thresholds
from rl_kernels.core.calls import Ready
from rl_kernels.core.saved import are_hooked, save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for, may_overwrite
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.linear_logp.arguments import Call, Operands, Options, call_of
from rl_kernels.linear_logp.inputs import FEW, slices, totals_of
from rl_kernels.linear_logp.known import Known, compare, draw, rows_to_check
from rl_kernels.linear_logp.op import ops
from rl_kernels.linear_logp.vocabulary import Shard, slots

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rl_kernels.linear_logp.halo import Halo

ROWS = 16384
"""Rows whose states are exchanged at once: this bounds their memory."""
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
        return _with_halo(*call_of(*tensors, group, options))
    checked, error = None, None
    try:
        checked = call_of(*tensors, group, options)
    except Exception as caught:
        # Whatever it is, the other ranks would wait for this one.
        error = caught
    same = {name: getattr(options, name) for name in OF_ALL_RANKS}
    for name, value in (("bias", bias), ("min_logit", options.min_logit)):
        same[name] = "none" if value is None else "given"
    needs_gradient = torch.is_grad_enabled() and getattr(hidden, "requires_grad", False)
    same["gradient of hidden"] = "is computed" if needs_gradient else "is not computed"
    kinds = (getattr(hidden, "dtype", None), getattr(target_ids, "dtype", None), getattr(hidden, "shape", (None,))[-1:])
    kind = "linear_logp", options.known is None, *map(str, (*same.values(), *kinds))
    agree_on_kind(
        "linear_logp", group, options.validate, kind, error, lambda: _compared(tensors, options, checked, same)
    )
    assert checked is not None
    return _with_halo(*checked)


def _with_halo(operands: Operands, call: Call) -> tuple[Operands, Call]:
    """Start the exchange of rows, if the shards are not those of ``vocab_shards``."""
    if call.shard.cuts is None:
        return operands, call
    if torch.compiler.is_compiling():
        ranks = len(call.shard.cuts) - 1
        raise ValueError(
            f"lm_head_weight: expected the rows of vocab_shards({call.shard.size}, {ranks}) under torch.compile, "
            f"got shards that begin at {call.shard.cuts[:-1]}"
        )
    from rl_kernels.linear_logp.halo import Halo

    return operands, call._replace(halo=Halo(call.shard, *operands[1:]))


def _compared(tensors: Any, options: Options, checked: Any, same: dict[str, object]) -> dict[str, object]:
    """Return what must be equal on all ranks: name -> value. It reads all hidden states and ids."""
    from rl_kernels.core.distributed import fingerprint

    read = {"hidden": tensors[0], "target_ids": tensors[2]}
    (_, weight, _), call = checked
    values = {**same, "first columns of the shards": call.shard.moved, "backend": call.ready.backend}
    if call.shard.moved is not None:
        # They go back to the ranks that own the rows.
        needs_gradient = torch.is_grad_enabled() and weight.requires_grad
        values["gradient of lm_head_weight"] = "is computed" if needs_gradient else "is not computed"
        values["lm_head_weight.main_grad"] = "none" if call.main_grad is None else "given"
    if isinstance(options.temperature, torch.Tensor):
        read["temperature"] = options.temperature
    else:
        values["temperature"] = options.temperature
    if options.min_logit is not None:
        read["min_logit"] = options.min_logit
    if options.known is not None:
        read |= {f"known.{name}": value for name, value in options.known._asdict().items() if value is not None}
    for name, value in read.items():
        values[name] = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        values[f"{name} (hash of its values)"] = fingerprint(value)
    return values


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
        return _forward_over_ranks(hidden, weight, bias, call, call.shard.group)
    if call.columns is not None:
        inputs = hidden, weight, call.target_ids, bias, call.temperature, call.ignore_index, call.cap
        logp, *stats, norm, kept = ops["forward_columns"](*inputs, call.columns, call.workspace_mib, call.ready.backend)
        return (logp, *stats, norm, kept) if call.has_stats else (logp, norm, kept)
    results: tuple[torch.Tensor, ...] = ops["forward_stats" if call.has_stats else "forward"].call(
        *(call.ready, hidden, weight, call.target_ids, bias, call.temperature, call.ignore_index, call.cap),
        *(call.min_logit, call.saved_mib),
    )
    return results


def _forward_over_ranks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call, group: ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Return what ``forward`` returns, of the shards of all ranks, and check targets.

    Raises:
        ValueError: a target is below ``min_logit``. No rank exchanges anything to find out: those of other ranks may
            be others.
    """
    from rl_kernels.core.distributed import all_gather

    shard, backend, ranks, per_slice, totals = call.shard, call.ready.backend, group.size(), [], []
    saved_mib = 0 if call.saved_mib is None and hidden.shape[0] > ROWS else call.saved_mib
    # At least one slice; only one if logits are kept, because joining those of several would copy them.
    count, units = max(hidden.shape[0], 1), slots(shard.size, ranks)
    for rows in slices(count, count if saved_mib or saved_mib is None else ROWS):
        part = call.of_rows(rows, saved_mib)
        run = partial(_states, hidden[rows], part, saved_mib)
        if call.halo is None:
            packed, kept = run(weight, bias, shard.start, units)
        else:
            packed, kept = call.halo.states(hidden[rows], part.target_ids, weight, bias, call.has_stats, run)
        # In equal slices on all ranks, also where some keep logits and others do not.
        for few in slices(rows.stop - rows.start, ROWS):
            one, mine = part.of_rows(few, saved_mib), packed[:, few].contiguous()
            gathered, rest = all_gather(mine, group).unflatten(0, (ranks, -1)), (one.temperature, call.ignore_index)
            per_slice.append(ops["finish"](gathered, one.target_ids, *rest, shard.size, call.has_stats, backend))
            if call.is_checked and call.min_logit is not None:
                totals.append(totals_of(gathered, entropy=call.has_stats))
    logp, lse, entropy, norm = per_slice[0] if len(per_slice) == 1 else map(torch.cat, zip(*per_slice, strict=True))
    if call.is_checked and call.min_logit is not None:
        thresholds.check_targets(logp, call.min_logit, lambda: torch.cat(totals))
    return (logp, lse, entropy, norm, kept) if call.has_stats else (logp, norm, kept)


def _states(
    hidden: torch.Tensor,
    call: Call,
    saved_mib: int | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    start: int,
    units: int,
    keeps: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed states of some columns, and the logits of them that are kept."""
    inputs = hidden, weight, call.target_ids, bias, call.temperature, call.ignore_index, call.cap, call.min_logit
    rest = start, units, call.has_stats, saved_mib if keeps else 0, call.ready.backend
    result: tuple[torch.Tensor, torch.Tensor] = ops["states"](*inputs, *rest)
    return result


def backward_op(name: str, group: ProcessGroup | None, halo: Halo | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return a raw op of the backward pass; in a group ``over_ranks`` and its first arguments."""
    return (ops[name],) if group is None else (over_ranks, ops[name], group, halo, dtype)


def over_ranks(
    op: Callable[..., Any], group: ProcessGroup, halo: Halo | None, dtype: torch.dtype, *args: Any
) -> tuple[Any, ...]:
    """Return the gradients of an op, that of hidden summed over the ranks of a group in ``dtype``."""
    from rl_kernels.core.distributed import all_reduce

    dhidden, *gradients = op(*args) if halo is None else halo.backward(op, *args)
    needed = args[-4 if len(gradients) == 2 else -6]
    return all_reduce(dhidden, group, dtype=dtype) if needed[0] else dhidden, *gradients


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
    part = call.of_rows(rows, 0)._replace(has_stats=has_stats, is_checked=False)
    logp, *stats, norm, _ = forward(hidden[rows], weight, bias, part)
    compare(call.known, rows, Known(logp, norm, *stats))


def check_targets(operands: Operands, call: Call, logp: torch.Tensor) -> None:
    """Check that the target of each row is at or above ``min_logit``, if there is one.

    Over ranks a forward pass has checked it. What is known there is taken to be NaN because logits are: to form them
    needs all ranks, and another may see no reason to.

    Raises:
        ValueError: it is not.
    """
    is_over_ranks = call.shard.group is not None
    if call.min_logit is None or (is_over_ranks and call.known is None):
        return
    unbounded = call._replace(min_logit=None, known=None, saved_mib=0, ready=Ready(call.ready.backend))

    @torch.no_grad()
    def without() -> torch.Tensor:
        return logp if is_over_ranks else forward(*operands, unbounded)[0]

    thresholds.check_targets(logp, call.min_logit, without)


def arguments_of_backward(
    inputs: Sequence[Any],
    saved: Sequence[Any],
    grads: Sequence[Any],
    shard: Shard,
    limits: Sequence[Any],
    columns: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of ``backward`` up to the backend; one or all three ``grads`` are those of results."""
    start, size, segments, group, _ = shard
    if len(grads) == 1:
        grads = *grads, None, None
    return *inputs, *saved, *grads, start, size, segments, group is not None, columns, *limits


class LinearLogp(torch.autograd.Function):
    """Saves the inputs, norm, entropy with ``has_stats``, and at most ``saved_mib`` of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, ...]:
        """Return logp, or the three statistics; what is known is not computed."""
        *results, norm, kept = forward(hidden, weight, bias, call)
        entropy = results[2] if call.has_stats else None
        least = call.min_logit
        below = None if least is None else thresholds.is_below(results[0], least)
        tensors = hidden, weight, call.target_ids, bias, call.temperature, call.cap, least, below, call.columns
        save(ctx, *tensors, norm, entropy, kept if kept.shape[1] else None)
        ctx.set_materialize_grads(False)
        # Not a saved tensor: other backward passes may add to the buffer before this one runs.
        ctx.main_grad = call.main_grad
        ctx.ignore_index, ctx.workspace_mib, ctx.join_tokens = call.ignore_index, call.workspace_mib, call.join_tokens
        ctx.shard, ctx.halo, ctx.backend = call.shard, call.halo, call.ready.backend
        # Few logits are not worth the host time. With a halo an op has a part of the logits, and does not own them.
        ctx.frees_kept = call.halo is None and kept.shape[1] > 0 and len(kept) > FEW and not are_hooked()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the arguments that the pass under way asks for."""
        hidden, weight, target_ids, bias, temperature, cap, least, below, columns, *saved = ctx.saved_tensors
        inputs = hidden, weight, target_ids, bias, temperature, ctx.ignore_index, cap, least
        if below is not None and upstream[0] is not None:
            upstream = upstream[0].masked_fill(below, 0.0), *upstream[1:]
        asked = ctx.needs_input_grad
        needed = [asked[number] and is_asked_for(ctx, number) for number in (0, 1, 2)]
        kept = saved[2]
        frees_kept = ctx.frees_kept and may_overwrite(kept)
        limits, group = (ctx.workspace_mib, needed, ctx.join_tokens, frees_kept), ctx.shard.group
        arguments = arguments_of_backward(inputs, saved, upstream, ctx.shard, limits, columns)
        dweight = None
        if needed[1] and ctx.main_grad is not None:
            op = backward_op("backward_main_grad", group, ctx.halo, hidden.dtype)
            dhidden, dbias = first_order(*op, *arguments, ctx.main_grad, None, ctx.backend)
        else:
            op = backward_op("backward", group, ctx.halo, hidden.dtype)
            dhidden, dweight, dbias = first_order(*op, *arguments, ctx.backend)
        # What is not needed is empty.
        return dhidden if needed[0] else None, dweight if needed[1] else None, dbias if needed[2] else None, None
