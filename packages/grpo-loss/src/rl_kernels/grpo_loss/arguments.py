"""Tensor checks shared by both loss functions."""

from __future__ import annotations

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check

MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *check.FLOATS)


class Layout:
    """The token layout of a call: ``[B, T]``, or packed ``[total]`` with ``cu_seqlens``.

    Attributes:
        cu_seqlens: offsets of packed sequences ``[B + 1]``, or None.
        max_seqlen: T of packed sequences, at least the longest one; 0 if they are not packed.
        batch: number of sequences.
        shape: of per-token tensors.
    """

    def __init__(
        self, current_logps: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None, values: bool
    ) -> None:
        check.tensor("current_logps", current_logps, check.FLOATS, ndim=2 if cu_seqlens is None else 1)
        self.cu_seqlens, self.max_seqlen, self.shape = cu_seqlens, 0, current_logps.shape
        if cu_seqlens is None:
            if max_seqlen is not None:
                raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {max_seqlen}")
            self.batch = current_logps.shape[0]
            return
        check.tensor("cu_seqlens", cu_seqlens, check.INTEGERS, ndim=1)
        if not cu_seqlens.shape[0]:
            raise ValueError("cu_seqlens: expected at least 1 offset, got 0")
        check.same_device(current_logps=current_logps, cu_seqlens=cu_seqlens)
        self.batch = cu_seqlens.shape[0] - 1
        self.max_seqlen = _longest(cu_seqlens, max_seqlen)
        if values and not values_hidden(cu_seqlens):
            _check_offsets(cu_seqlens, current_logps.shape[0], self.max_seqlen)

    def scores(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Check a tensor with one value per sequence or per token; return it as raw ops take it."""
        check.tensor(name, value, check.FLOATS, least=1)
        expected: tuple[int, ...] = (self.batch,)
        if self.cu_seqlens is None and value.ndim != 1:
            expected = self.shape
        elif self.cu_seqlens is not None and value.shape != expected:
            check.shape(name, value, self.shape, "one per sequence or per token of current_logps")
            return value.detach()[None]
        check.shape(name, value, expected, "one per sequence or per token of current_logps")
        return value.detach()

    def tokens(
        self, current_logps: torch.Tensor, mask: torch.Tensor, values: bool, **optional: torch.Tensor | None
    ) -> None:
        """Check the mask and the other per-token tensors."""
        for name, value in optional.items():
            if value is not None:
                check.tensor(name, value, check.FLOATS)
                check.shape(name, value, self.shape, "that of current_logps")
        check.tensor("completion_mask", mask, MASKS)
        check.shape("completion_mask", mask, self.shape, "that of current_logps")
        check.same_device(current_logps=current_logps, **optional, completion_mask=mask)
        if values and mask.dtype != torch.bool and not values_hidden(mask):
            _check_mask(mask)


def _longest(cu_seqlens: torch.Tensor, max_seqlen: int | None) -> int:
    if max_seqlen is not None:
        check.integer("max_seqlen", max_seqlen, least=0, most=check.INT32)
        return max_seqlen
    if values_hidden(cu_seqlens):
        raise ValueError("max_seqlen: expected an integer under torch.compile and graph capture, got None")
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def _zero_or_one(mask: torch.Tensor) -> None:
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f"completion_mask: expected values 0 and 1, got {wrong[0].item()}")


def _offsets(cu_seqlens: torch.Tensor, total: int, longest: int) -> None:
    lengths = cu_seqlens.diff()
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != total or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens: expected offsets that rise from 0 to {total} and never fall, got first {first}, last {last}"
        )
    if bool((lengths > longest).any()):
        raise ValueError(f"max_seqlen: expected at least {int(lengths.max())}, the longest sequence, got {longest}")


_check_mask = define_check("check_completion_mask", "(Tensor mask)", _zero_or_one)
_check_offsets = define_check("check_cu_seqlens", "(Tensor cu_seqlens, SymInt total, SymInt longest)", _offsets)
