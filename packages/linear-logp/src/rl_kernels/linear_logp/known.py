"""Statistics that are known before the forward pass, and the check that they are those of its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.ulps import ulps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Known(NamedTuple):
    """What ``linear_logp_known`` returns, for a call of ``linear_logp_from_known``.

    In FP32, or FP64 for FP64 inputs; 0 at ignored positions. ``[...]`` is the shape of the ids.

    Attributes:
        logp: ``[...]``, log-probability of the selected token.
        norm: ``[..., 2]``: the largest logit, capped and before the temperature, and the log of the sum of
            ``e^(z - max z)``; backward computes probabilities from these two.
        logsumexp: ``[...]``, of the logits after temperature; None without ``return_stats``.
        entropy: ``[...]``, in nats; None without ``return_stats``.
    """

    logp: torch.Tensor
    norm: torch.Tensor
    logsumexp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def of_rows(self, target_ids: torch.Tensor, ignore_index: int | None) -> Known:
        """Return the statistics of rows with these ids ``[N]``: ``norm[N, 2]``, the others ``[N]``; 0 where ignored."""
        active = None if ignore_index is None else target_ids != ignore_index

        def flat(value: torch.Tensor, *last: int) -> torch.Tensor:
            value = value.detach().reshape(len(target_ids), *last)
            if active is None:
                return value.contiguous()
            return torch.where(active.view(-1, *[1] * len(last)), value, 0.0)

        stats = (None if value is None else flat(value) for value in self[2:])
        return Known(flat(self.logp), flat(self.norm, 2), *stats)

    def results(self, hidden: torch.Tensor, *, return_stats: bool) -> tuple[torch.Tensor, ...]:
        """Return the results of the forward pass over rows ``hidden[N, D]``, copied; no logits are kept."""
        none_kept = hidden.new_empty((len(hidden), 0), dtype=self.logp.dtype)
        results = [self.logp.clone()]
        if return_stats:
            assert self.logsumexp is not None
            assert self.entropy is not None
            results += [self.logsumexp.clone(), self.entropy.clone()]
        return *results, self.norm, none_kept

    @staticmethod
    def validate(known: object, hidden: torch.Tensor, target_ids: torch.Tensor, *, return_stats: bool) -> None:
        """Check the kinds and shapes of known statistics.

        Raises:
            TypeError, ValueError: they do not fit the call; the message names the argument.
        """
        if not isinstance(known, Known):
            raise TypeError(f"known: expected what linear_logp_known returns, got {type(known).__name__}")
        dtype, shape = compute_dtype(hidden.dtype), target_ids.shape
        for name, value in known._asdict().items():
            if value is None and name in ("logsumexp", "entropy"):
                if return_stats:
                    raise ValueError(f"known: expected {name} with return_stats=True; give it to the earlier call too")
                continue
            check.tensor(f"known.{name}", value, (dtype,))
            expected = (*shape, 2) if name == "norm" else tuple(shape)
            check.shape(f"known.{name}", value, expected, "the shape of target_ids" + " and 2" * (name == "norm"))
            check.same_device(hidden=hidden, **{f"known.{name}": value})


class BitsDiffer(RuntimeError):
    """Statistics that a caller called known are not those of its inputs."""


_seeds = itertools.count(1)
_seeds_of_groups: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def draw(group: ProcessGroup | None) -> int:
    """Return the next seed for the choice of rows that are recomputed: the same on all ranks of a group."""
    return next(_seeds if group is None else _seeds_of_groups.setdefault(group, itertools.count(1)))


def rows_to_check(target_ids: torch.Tensor, ignore_index: int | None, count: int, seed: int) -> torch.Tensor:
    """Return ``count`` rows of ``target_ids[N]`` that are not ignored, if there are any; it reads nothing on the host.

    A row may occur twice.
    """
    size = len(target_ids)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    draws = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    if ignore_index is None:
        return (draws * size).long().to(target_ids.device, non_blocking=True)
    # Active rows have the numbers 1, 2, ...
    numbers = (target_ids != ignore_index).cumsum(0)
    numbers_drawn = (draws.to(target_ids.device, non_blocking=True) * numbers[-1]).long() + 1
    return torch.searchsorted(numbers, numbers_drawn).clamp_(max=size - 1)


def compare(known: Known, rows: torch.Tensor, recomputed: Known) -> None:
    """Compare rows that were recomputed with what is known, bit for bit; it syncs with a GPU once.

    Raises:
        BitsDiffer: a number differs; the message names its row, and how far it is off.
    """
    values = {name: value[rows] for name, value in known._asdict().items() if value is not None}
    distances = {name: _distances(value, getattr(recomputed, name)) for name, value in values.items()}
    if not bool(torch.stack([value.amax() for value in distances.values()]).any()):
        return
    for name, value in distances.items():
        worst = value if value.ndim == 1 else value.amax(1)
        if bool(worst.any()):
            index = int(worst.argmax())
            raise BitsDiffer(
                f"known.{name}: expected the bits that these inputs give, row {int(rows[index])} differs by "
                f"{int(worst[index])} ULPs, and {int((worst > 0).sum())} of the {len(rows)} recomputed rows differ; "
                "hidden states, weight or options are not those of the earlier call"
            )


def _distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how many floats two tensors are apart; 0 for two NaNs."""
    return torch.where(one.isnan() & other.isnan(), 0, ulps(one, other))
