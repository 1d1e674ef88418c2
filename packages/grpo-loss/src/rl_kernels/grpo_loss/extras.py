"""``Extras`` and ``Normalizer``: optional inputs of a loss besides log-probabilities and rewards."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.ops import define_check
from rl_kernels.grpo_loss.call import FORMS


class Extras(NamedTuple):
    """Optional tensors of a call; new values need no new graph under ``torch.compile``.

    Attributes:
        rollout_ratio: ``[B]`` or ``[B, T]``, FP32, BF16, FP16 or FP64: probability under the old policy, divided by
            that under the engine that sampled. It multiplies the policy term; in ``vespo`` it is part of the weight.
            ``Objective.rollout_mode`` bounds it.
        entropy: ``[B, T]``, any of those dtypes; used for the metrics only.
    """

    rollout_ratio: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class Normalizer(NamedTuple):
    """The count that sums are divided by, given so that losses of micro-batches add up.

    Attributes:
        num_tokens: a number > 0, or a tensor of no dims on the device of the log-probabilities; only for loss types
            that divide by tokens. By default the active tokens of the call. If no token is active it may be 0: the
            loss is then 0. Reading a tensor's value syncs with a GPU; ``validate=False`` does not read it.
        num_sequences: the same, only for loss types that average over sequences. By default B, which counts masked
            sequences too.
        max_completion_length: an integer >= 1; only for ``dr_grpo``, which divides by it too. By default T.
    """

    num_tokens: float | torch.Tensor | None = None
    num_sequences: float | torch.Tensor | None = None
    max_completion_length: int | None = None


class Divisor(NamedTuple):
    """A checked normalizer: its name, a number or a tensor or neither, and the length of ``dr_grpo`` (0 means T)."""

    name: str
    number: float | None
    tensor: torch.Tensor | None
    length: float


OptionGroup = TypeVar("OptionGroup", Extras, Normalizer)
NO_EXTRAS, NO_NORMALIZER = Extras(), Normalizer()


def value_or_default(name: str, value: OptionGroup | None, default: OptionGroup) -> OptionGroup:
    """Return ``value``, or ``default`` for None; raise ``TypeError`` if it is of another type than ``default``."""
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise TypeError(f"{name}: expected {type(default).__name__}(...), got {type(value).__name__}")
    return value


def divisor_of(loss_type: str, normalizer: Normalizer) -> Divisor:
    """Check a normalizer for a loss type.

    Raises:
        TypeError, ValueError: a member is out of range or does not apply to this loss type; the message names it.
    """
    by_tokens = FORMS[loss_type].mean == "tokens"
    name, value = ("num_tokens", normalizer.num_tokens) if by_tokens else ("num_sequences", normalizer.num_sequences)
    other, unused = ("num_sequences", normalizer.num_sequences) if by_tokens else ("num_tokens", normalizer.num_tokens)
    if unused is not None:
        raise ValueError(f"{other}: expected None with loss_type {loss_type!r}, which divides by {name}, got a value")
    length = _length(loss_type, normalizer.max_completion_length)
    if value is None:
        return Divisor(name, None, None, length)
    if isinstance(value, torch.Tensor):
        check.tensor(name, value, (*check.FLOATS, *check.INTEGERS), ndim=0)
        return Divisor(name, None, value.detach(), length)
    _number(name, value)
    return Divisor(name, value, None, length)


def _number(name: str, value: float) -> None:
    check.number(name, value, least=0)
    if value:
        check.number(name, value, above=0)


def _count(value: torch.Tensor, mask: torch.Tensor, name: str) -> None:
    count = value.item()
    _number(name, count)
    if not count and mask.any():
        raise ValueError(f"{name}: expected a number > 0, because a token is active, got {count}")


check_count = define_check("check_count", "(Tensor value, Tensor mask, str name)", _count)


def _length(loss_type: str, length: int | None) -> float:
    if length is None:
        return 0.0 if loss_type == "dr_grpo" else 1.0
    check.integer("max_completion_length", length, least=1)
    if loss_type != "dr_grpo":
        raise ValueError(f"max_completion_length: expected None with loss_type {loss_type!r}, got {length}")
    return length
