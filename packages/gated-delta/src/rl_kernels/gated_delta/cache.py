"""The cache of sequences that go on: the state at the start of the open chunk, and the rows of that chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.gated_delta.constants import CHUNK, MOST_TOKENS
from rl_kernels.gated_delta.inputs import state_dtype


class DeltaCache(NamedTuple):
    """What a sequence needs to go on with the bits of one call: the state of its last whole chunk, and newer rows.

    ``gated_delta_rule(..., cache=)`` writes to these tensors in place; their shapes never change, so a CUDA graph may
    hold them. Row r is token ``lengths // 64 * 64 + r`` of its sequence; rows from ``lengths % 64`` on are undefined.

    Attributes:
        state: ``[B, Hv, Dk, Dv]``, FP32: the recurrent state after the last whole chunk of 64 tokens.
        keys: ``[B, Hk, 64, Dk]`` in the dtype of k: normalized keys.
        residuals: ``[B, Hv, 64, Dv]`` in the dtype of v: values less what the state predicts for their keys.
        decays: ``[B, Hv, 64]``, FP32: sums of g from the first row of the chunk to each row.
        inverse: ``[B, Hv, 64, 64]``, FP32: rows of the inverse of the chunk's system, times beta of their columns;
            numbers above the diagonal are undefined.
        lengths: ``[B]``, int32: tokens of each sequence, fewer than 2^23.
    """

    state: torch.Tensor
    keys: torch.Tensor
    residuals: torch.Tensor
    decays: torch.Tensor
    inverse: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        key_heads: int,
        value_heads: int,
        key_size: int,
        value_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> DeltaCache:
        """Return the cache of ``batch`` sequences without a token.

        Args:
            batch: number of sequences.
            key_heads: Hk.
            value_heads: Hv.
            key_size: Dk.
            value_size: Dv.
            dtype: dtype of q, k and v.
            device: device of the tensors; by default the current default device.
        """
        shape = batch, value_heads, key_size, value_size
        device = torch.get_default_device() if device is None else device
        state = torch.zeros(shape, dtype=state_dtype(dtype), device=device)
        return cls.from_recurrent(state, key_heads, dtype=dtype)

    @classmethod
    def from_recurrent(
        cls, state: torch.Tensor, key_heads: int, *, dtype: torch.dtype, lengths: torch.Tensor | None = None
    ) -> DeltaCache:
        """Return a cache that goes on from recurrent states; a new chunk begins there.

        Args:
            state: ``[B, Hv, Dk, Dv]``, FP32 (FP64 for FP64 operands), copied without its graph.
            key_heads: Hk, a divisor of Hv.
            dtype: dtype of q, k and v.
            lengths: ``[B]``, int32 or int64: tokens of each sequence so far, multiples of 64 below 2^23; by default 0.
                Only at such a length does the sequence go on with the bits of one call.

        Raises:
            TypeError, ValueError: an argument is not as above; the message names it.
        """
        if dtype not in check.FLOATS:
            raise TypeError(f"dtype: expected one of {', '.join(map(str, check.FLOATS))}, got {dtype}")
        check.tensor("state", state, (state_dtype(dtype),), ndim=4)
        batch, heads, key_size, value_size = state.shape
        check.integer("key_heads", key_heads, least=1)
        if heads % key_heads:
            raise ValueError(f"key_heads: expected a divisor of the {heads} heads of state, got {key_heads}")
        if lengths is None:
            lengths = state.new_zeros(batch, dtype=torch.int32)
        else:
            check.tensor("lengths", lengths, check.INTEGERS, ndim=1)
            check.shape("lengths", lengths, (batch,), "one for each sequence of state")
            if bool(((lengths % CHUNK != 0) | (lengths < 0) | (lengths >= MOST_TOKENS)).any()):
                raise ValueError(
                    f"lengths: expected multiples of {CHUNK} from 0 and below {MOST_TOKENS}, got {lengths.tolist()}"
                )
        return cls(
            state.detach().clone(memory_format=torch.contiguous_format),
            state.new_zeros((batch, key_heads, CHUNK, key_size), dtype=dtype),
            state.new_zeros((batch, heads, CHUNK, value_size), dtype=dtype),
            state.new_zeros((batch, heads, CHUNK)),
            state.new_zeros((batch, heads, CHUNK, CHUNK)),
            lengths.to(torch.int32, copy=True),
        )

    def to_recurrent(self) -> torch.Tensor:
        """Return the recurrent states ``[B, Hv, Dk, Dv]``: copies of ``state``, with the open chunk added.

        For a sequence without an open row these are the bits of ``state``.
        """
        with torch.autocast(self.state.device.type, enabled=False):
            opened = (self.lengths.long() % CHUNK)[:, None, None]
            row = torch.arange(CHUNK, device=self.state.device)
            is_row, dtype = (row < opened)[..., None], self.state.dtype
            residuals = torch.where(is_row, self.residuals.to(dtype), 0.0)
            keys = torch.where(is_row, self.keys.to(dtype), 0.0).repeat_interleave(
                self.state.shape[1] // self.keys.shape[1], 1
            )
            last = self.decays.gather(2, (opened - 1).clamp(min=0).expand(-1, self.decays.shape[1], 1))
            fading = (last - self.decays).exp()[..., None] * self.inverse
            fading = torch.where(is_row & (row <= row[:, None]), fading, 0.0).to(self.keys.dtype).to(dtype)
            weights = (fading.mT @ keys).to(self.keys.dtype).to(dtype)
            added = last.exp()[..., None] * self.state + weights.mT @ residuals
            return torch.where((opened > 0)[..., None], added, self.state)

    def select(self, sequences: torch.Tensor | Sequence[int]) -> DeltaCache:
        """Return a copy with these sequences, in this order; one that comes twice is forked, as beams are.

        Args:
            sequences: integers in ``[0, B)``, one dim.

        Raises:
            TypeError, ValueError: sequences are not as above, such as a mask.
        """
        index = _integers("sequences", sequences, self.lengths.device)
        check.ids_in_range("sequences", index, len(self.lengths), ignorable=False)
        return DeltaCache(*(x.index_select(0, index) for x in self))

    def crop(self, lengths: torch.Tensor | Sequence[int]) -> None:
        """Forget the newest tokens, in place, such as guesses that were not accepted.

        Args:
            lengths: ``[B]``, integers: tokens that each sequence keeps. Only rows of the open chunk can be forgotten,
                since older ones are part of the state.

        Raises:
            TypeError: lengths are not integers.
            ValueError: a sequence would have to grow, or to forget older tokens; the message says which are held.
        """
        kept = _integers("lengths", lengths, self.lengths.device)
        check.shape("lengths", kept, self.lengths.shape, "one for each sequence")
        least = self.lengths // CHUNK * CHUNK
        if bool(((kept < least) | (kept > self.lengths)).any()):
            raise ValueError(
                f"lengths: expected {least.tolist()} to {self.lengths.tolist()}, the tokens that the cache can go back "
                f"to, got {kept.tolist()}"
            )
        self.lengths.copy_(kept)


def _integers(name: str, values: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return integers in one dim as int64; nothing else is converted to them."""
    integers = torch.as_tensor(values, device=device)
    # An empty list becomes a tensor of floats.
    is_empty = not isinstance(values, torch.Tensor) and not integers.numel()
    if integers.dtype not in check.INTEGERS and not is_empty:
        raise TypeError(f"{name}: expected integers of 32 or 64 bits, got {integers.dtype}")
    if integers.ndim != 1:
        raise ValueError(f"{name}: expected 1 dim, got shape {tuple(integers.shape)}")
    return integers.long()
