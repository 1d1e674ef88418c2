"""Shards that are not those of ``vocab_shards``: rows of the weight go to the rank that works on them, gradients back.

Every rank works on the columns that ``vocab_shards`` gives it, so no sum changes its order. Rows that it lacks, the
halo, come from the ranks that have them, by one all-to-all in each call, which runs while the rank works on rows of its
own; the gradients of these rows go back. No halo is kept for the next call: optimizers write weights through ``.data``
and by kernels of their own, which leaves no trace that a cache could look at.

An op takes one tensor of rows. So a pass takes ranges of columns, whole units (forward) or segments (backward): a range
whose rows are all the rank's own is a view of the weight, others are copied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from rl_kernels.core import validate as check
from rl_kernels.core.constants import UNIT
from rl_kernels.core.distributed import group_rank, group_size
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.backward import add_segment, total_of
from rl_kernels.linear_logp.inputs import first_kept, packed_room
from rl_kernels.linear_logp.vocabulary import Shard, VocabCuts, slots, units, vocab_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WEIGHT, BIAS, KEPT, START, SEGMENTS, NEEDED, TOTALS = 1, 3, 10, 14, 16, 20, 23
"""Places of arguments of the raw ops of the backward pass."""
States = Callable[[torch.Tensor, "torch.Tensor | None", int, int, bool], tuple[torch.Tensor, torch.Tensor]]
"""The raw op ``states``, called with weight, bias, the first column, units, and whether logits may be kept."""


class Rows(NamedTuple):
    """A tensor with a row for each row of the weight: of this rank's, and of the halo."""

    own: torch.Tensor
    halo: torch.Tensor


class Halo:
    """The rows that this rank works on and does not have; making it starts their exchange.

    Args:
        shard: one with ``cuts``.
        weight: ``[rows, D]``: the rows of this rank, pad rows last.
        bias: ``[rows]``, or None.
    """

    def __init__(self, shard: Shard, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        assert shard.group is not None
        assert shard.cuts is not None
        self._shard, self._group = shard, shard.group
        rank, ranks = group_rank(self._group), group_size(self._group)
        worked, owned = vocab_shards(shard.size, ranks), list(pairwise(shard.cuts))
        (self._begin, self._end), (first, stop) = worked[rank], owned[rank]
        self._sent = [_common(owned[rank], worked[other]) * (other != rank) for other in range(ranks)]
        self._received = [_common(owned[other], worked[rank]) * (other != rank) for other in range(ranks)]
        # The columns that this rank both has and works on, and which of its rows these are; if none, after the halo.
        low, high = max(first, self._begin), min(stop, self._end)
        stays = slice(low - first, high - first)
        if low >= high:
            low = high = self._end
            stays = slice(0, 0)
        self._first, self._rows, self._low, self._high, self._stays = first, stop - first, low, high, stays
        self._under_way: list[Any] = []
        self._weight = self._fetch(weight.detach(), in_background=True)
        self._bias = None if bias is None else self._fetch(bias.detach(), in_background=True)

    def states(
        self,
        hidden: torch.Tensor,
        target_ids: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        entropy: bool,
        op: States,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed states of the columns that this rank works on, and its kept logits."""
        packed, states, chosen = packed_room(hidden, slots(self._shard.size, group_size(self._group)), entropy=entropy)
        kept = hidden.new_empty((len(hidden), 0), dtype=compute_dtype(hidden.dtype))
        inner = self._inner
        # Own rows first: the halo is under way.
        for number, (low, high) in enumerate((inner, (self._begin, inner[0]), (inner[1], self._end))):
            if low == high:
                continue
            count, first = units(high - low), units(low - self._begin)
            part, logits = op(*self._operands(weight, bias, low, high), low, count, number == 0)
            kept = logits if number == 0 else kept
            states[first : first + count] = part[:-1].view(count, *states.shape[1:])
            chosen.copy_(torch.where((target_ids >= low) & (target_ids < high), part[-1], chosen))
        self._wait()
        return packed, kept

    def backward(self, op: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, ...]:
        """Return what a raw op of the backward pass does for whole segments, of this rank's rows."""
        weight, bias, kept, needed = (args[place] for place in (WEIGHT, BIAS, KEPT, NEEDED))
        *totals, backend = args[TOTALS:]
        main_grad, bias_total = totals or (None, None)
        # Their gradients: totals that are continued travel too.
        into = self._room(weight, main_grad, needed[1]), self._room(bias, bias_total, needed[2])
        waiting: list[torch.Tensor] = []
        for number, (low, high) in enumerate(self._segments(args[SEGMENTS]), 1):
            here = [*args[:TOTALS]]
            here[WEIGHT], here[BIAS] = self._operands(weight, bias, low, high)
            here[KEPT], here[START] = self._kept(kept, low, high), low
            views = [None if rows is None else self._views(rows, low, high) for rows in into]
            sums = [_joined(view, total) for view, total in zip(views, (main_grad, bias_total), strict=True)]
            partial, *gradients = op(*here, *sums[: len(totals)], backend)
            add_segment(waiting, number, partial)
            results = (None, *gradients)[-2:]
            for parts, total, result in zip(views, sums, results, strict=True):
                if parts is not None and not (total is not None and len(parts) == 1):
                    whole = result if total is None else total
                    for part, value in zip(parts, whole.split(list(map(len, parts))), strict=True):
                        part.copy_(value)
        for rows in into:
            if rows is not None:
                self._give_back(rows)
        dhidden = total_of(waiting)
        empty = dhidden.new_empty(0, dtype=weight.dtype)
        dweight, dbias = (empty if rows is None else rows.own for rows in into)
        return (dhidden, empty if bias_total is not None else dbias) if totals else (dhidden, dweight, dbias)

    @property
    def _inner(self) -> tuple[int, int]:
        """The columns of whole units whose rows are this rank's own."""
        begin, end = self._begin, self._end
        low = begin + units(self._low - begin) * UNIT
        high = end if self._high == end else begin + (self._high - begin) // UNIT * UNIT
        return (low, high) if low < high else (end, end)

    def _segments(self, number: int) -> list[tuple[int, int]]:
        """Return the segments that this rank works on; if it has no columns, an empty one."""
        bounds = vocab_shards(self._shard.size, number)
        return [(low, high) for low, high in bounds if self._begin <= low < high <= self._end] or [(self._begin,) * 2]

    def _kept(self, kept: torch.Tensor | None, low: int, high: int) -> torch.Tensor | None:
        """Return the kept logits of a range; None if its rows are copied together, or none are kept."""
        first, end = self._inner
        if kept is None or low < first or high > end:
            return None
        begins = first + first_kept(end - first, kept.shape[1])
        stops = kept.shape[1] if high == end else high - begins
        return kept[:, max(low - begins, 0) : stops] if begins < high else None

    def _operands(
        self, weight: torch.Tensor, bias: torch.Tensor | None, low: int, high: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and bias of a range."""
        if low < self._low or high > self._high:
            self._wait()
        rows = _joined(self._views(Rows(weight, self._weight), low, high), weight)
        if bias is None or self._bias is None:
            return rows, None
        return rows, _joined(self._views(Rows(bias, self._bias), low, high), bias)

    def _views(self, rows: Rows, low: int, high: int) -> list[torch.Tensor]:
        """Return the parts of a range in order: halo, own rows, halo."""
        before = self._low - self._begin
        spans = (
            (rows.halo, self._begin, low, min(high, self._low)),
            (rows.own, self._first, max(low, self._low), min(high, self._high)),
            (rows.halo, self._high - before, max(low, self._high), high),
        )
        parts = [x[first - zero : stop - zero] for x, zero, first, stop in spans if first < stop]
        return parts or [rows.own[:0]]

    def _room(self, x: torch.Tensor | None, total: torch.Tensor | None, is_needed: bool) -> Rows | None:
        """Return room for the gradient of ``x``, or a total; pad rows of a gradient are 0."""
        if x is None or not is_needed:
            return None
        if total is not None:
            return Rows(total, self._fetch(total))
        own = x.new_empty(x.shape)
        own[self._rows :] = 0
        return Rows(own, x.new_empty((sum(self._received), *x.shape[1:])))

    def _fetch(self, x: torch.Tensor, *, in_background: bool = False) -> torch.Tensor:
        """Return the rows of the halo of ``x``, whose rows are those of the weight."""
        sent = torch.cat([x[: self._stays.start], x[self._stays.stop : self._rows]])
        return self._exchange(sent, self._received, self._sent, in_background)

    def _give_back(self, rows: Rows) -> None:
        """Write gradients or totals of the halo to their owners' tensors."""
        received = self._exchange(rows.halo, self._sent, self._received, False)
        before = self._stays.start
        rows.own[:before] = received[:before]
        rows.own[self._stays.stop : self._rows] = received[before:]

    def _exchange(
        self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], in_background: bool
    ) -> torch.Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        # All ranks know the cuts, and so whether any row moves.
        if self._shard.moved is not None:
            work = distributed.all_to_all_single(
                out, x, list(received), list(sent), group=self._group, async_op=in_background
            )
            if work is not None:
                self._under_way.append(work)
        return out

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()


def of_dtensors(
    weight: Any, bias: Any, group: ProcessGroup, vocab_size: int | VocabCuts | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabCuts]:
    """Return the local parts of a weight and a bias that are sharded on dim 0 over a group, and its cuts.

    Raises:
        TypeError, ValueError: they are sharded in another way, or the arguments say otherwise.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as ShardOf

    for name, value in (("lm_head_weight", weight), ("bias", bias)):
        if value is None:
            continue
        if not isinstance(value, DTensor):
            raise TypeError(f"{name}: expected a DTensor, as lm_head_weight is, got {type(value).__name__}")
        mesh, placements = value.device_mesh, value.placements
        if mesh.ndim != 1 or placements != (ShardOf(0),):
            raise ValueError(f"{name}: expected a DTensor with placements (Shard(0),), got {placements} on {mesh}")
        if distributed.get_process_group_ranks(mesh.get_group()) != distributed.get_process_group_ranks(group):
            raise ValueError(f"{name}: expected a DTensor on the ranks of process_group, got one on {mesh}")
    if isinstance(vocab_size, VocabCuts):
        raise ValueError("vocab_size: expected an integer or None with a DTensor, whose cuts are known, got VocabCuts")
    if getattr(weight, "main_grad", None) is not None:
        raise ValueError("lm_head_weight.main_grad: expected none on a DTensor: pass its to_local() with a main_grad")
    rows, ranks = weight.shape[0], group.size()
    size = rows if vocab_size is None else vocab_size
    check.integer("vocab_size", size, least=1)
    if size > rows:
        raise ValueError(f"vocab_size: expected at most {rows}, the rows of the DTensor lm_head_weight, got {size}")
    cuts = tuple(min(rank * -(-rows // ranks), rows) for rank in range(ranks + 1))
    local = None if bias is None else bias.to_local()
    return weight.to_local(), local, VocabCuts(size, cuts)


def _common(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return the number of columns in both ranges."""
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0)


def _joined(parts: list[torch.Tensor] | None, wanted: torch.Tensor | None) -> Any:
    """Return one tensor of rows: a view if it is one part; None if it is not wanted."""
    if parts is None or wanted is None:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)
