"""What a call brings beside its log-probabilities and rewards, grouped: ``Extras`` and ``Normaliser``."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from rl_kernels.core import validate as check
from rl_kernels.grpo_loss.plan import FORMS


class Extras(NamedTuple):
    """Tensors that a call may bring; a value that changes needs no new graph under ``torch.compile``.

    Attributes:
        rollout_ratio: ``[B]`` or ``[B, T]``, probability under old over that under the sampler; multiplies the policy
            term, and joins the weight of ``vespo``. ``Objective.rollout_mode`` says how it is bounded.
        entropy: ``[B, T]``, for the metrics alone.
        cu_seqlens: offsets ``[B + 1]`` of packed sequences, int32 or int64: what is ``[B, T]`` elsewhere is
            ``[total]``.
        max_seqlen: T of packed sequences; by default their longest, which a GPU must be waited for.
    """

    rollout_ratio: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None


class Normaliser(NamedTuple):
    """What sums are divided by in place of the batch's own counts, so that losses of micro-batches add up.

    Attributes:
        num_tokens: for types that are divided by tokens: a number >= 1, or a tensor without dims on the device, which
            nothing waits for.
        num_sequences: the same for types that are means over sequences, > 0; by default B, masked ones too.
        max_completion_length: what ``dr_grpo`` divides by too; by default T.
    """

    num_tokens: float | torch.Tensor | None = None
    num_sequences: float | torch.Tensor | None = None
    max_completion_length: int | None = None


class Divisor(NamedTuple):
    """A checked normaliser: a number (0 if none is given) or a tensor, and the length of ``dr_grpo`` (0 for T)."""

    number: float
    tensor: torch.Tensor | None
    length: float


Group = TypeVar("Group", Extras, Normaliser)
NO_EXTRAS, NO_NORMALISER = Extras(), Normaliser()


def group(name: str, value: Group | None, empty: Group) -> Group:
    """Return one of the two above, the empty one for None; ``TypeError`` for what is neither."""
    if value is None:
        return empty
    if not isinstance(value, type(empty)):
        raise TypeError(f"{name}: expected {type(empty).__name__}(...), got {type(value).__name__}")
    return value


def divisor_of(loss_type: str, given: Normaliser) -> Divisor:
    """Check a normaliser for a loss type.

    Raises:
        TypeError, ValueError: a member is out of range, or means nothing for this loss type; the message names it.
    """
    by_tokens = FORMS[loss_type].mean == "tokens"
    name, value = ("num_tokens", given.num_tokens) if by_tokens else ("num_sequences", given.num_sequences)
    other, unused = ("num_sequences", given.num_sequences) if by_tokens else ("num_tokens", given.num_tokens)
    if unused is not None:
        raise ValueError(f"{other}: expected None with loss_type {loss_type!r}, divided by {name}, got a value")
    length = _length(loss_type, given.max_completion_length)
    if value is None:
        return Divisor(0.0, None, length)
    if isinstance(value, torch.Tensor):
        check.tensor(name, value, (*check.FLOATS, *check.INTEGERS), ndim=0)
        return Divisor(0.0, value.detach(), length)
    if by_tokens:
        check.number(name, value, least=1)
    else:
        check.number(name, value, above=0)
    return Divisor(value, None, length)


def _length(loss_type: str, length: int | None) -> float:
    if length is None:
        return 0.0 if loss_type == "dr_grpo" else 1.0
    check.integer("max_completion_length", length, least=1)
    if loss_type != "dr_grpo":
        raise ValueError(f"max_completion_length: expected None with loss_type {loss_type!r}, got {length}")
    return length
