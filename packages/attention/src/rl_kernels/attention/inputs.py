"""The arguments of the raw ops by name, and the result of the public function."""

from __future__ import annotations

from typing import NamedTuple

import torch

Window = tuple[int | None, int | None]
"""The sides of the window as arguments; None is unlimited."""
UNLIMITED = -1
"""An unlimited side of the window."""
INTEGER_TENSORS = slice(4, 10)
"""Places of the integer tensors in ``Inputs``, from cu_seqlens_q to block_table."""


class Attended(NamedTuple):
    """The result of ``det_attention`` with ``return_lse``.

    Attributes:
        out: ``[B, T, H, Dv]`` or ``[total, H, Dv]`` in the dtype of q.
        lse: logsumexp of each query's scores, sink included, to base e: FP32, ``[B, H, T]`` or ``[H, total]``; it
            carries no gradient.
    """

    out: torch.Tensor
    lse: torch.Tensor


class Inputs(NamedTuple):
    """The arguments of the raw ops, in the order of their schemas.

    q is ``[B, T, H, D]``, or ``[total, H, D]`` where cu_seqlens_q is given; k and v are ``[B, S, Hkv, D]``,
    ``[total, Hkv, D]`` with cu_seqlens_k, or ``[pages, page_size, Hkv, D]`` with block_table. max_seqlen_q and
    max_seqlen_k are at least the longest sequence. left and right are the sides of the window; causal sets right to 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    k_start: torch.Tensor | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    block_table: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    left: int
    right: int
    softcap: float

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors q, k and v."""
        return self[:3]

    @property
    def integer_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors from cu_seqlens_q to block_table."""
        return self[4:10]

    @property
    def numbers(self) -> tuple[float, ...]:
        """The arguments after the tensors, from max_seqlen_q to softcap."""
        return self[10:]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def group(self) -> int:
        """The number of query heads that share a KV head."""
        return self.q.shape[-2] // self.k.shape[-2]

    def out_shape(self) -> tuple[int, ...]:
        """Return the shape of out: that of q, with the head size of v."""
        return *self.q.shape[:-1], self.v.shape[-1]

    def lse_shape(self) -> tuple[int, ...]:
        """Return the shape of lse: ``[B, H, T]`` or ``[H, total]``."""
        *batch, queries, heads, _ = self.q.shape
        return *batch, heads, queries
