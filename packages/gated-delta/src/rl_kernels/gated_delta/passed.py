"""What the passes over chunks of a backward pass leave for the kernels that have all chunks at once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from rl_kernels.gated_delta.inputs import Inputs


class Passed(NamedTuple):
    """The tensors, in the dtype of q unless it is said; ``slots`` are places of chunks.

    Attributes:
        unit_q: ``[slots, Hk, 64, Dk]``, normalized; unit_k likewise.
        sums: ``[slots, Hv, 64]``, FP32: sums of the decays from the first row of a chunk.
        inverse: ``[slots, Hv, 64, 64]``, FP32: T.
        states: ``[slots, Hv, Dk, Dv]`` at the start of chunks, rounded; dstates: gradients of those after them.
        residuals: ``[slots, Hv, 64, Dv]``.
        kept: ``[slots, Hv, ...]``, FP32: parts of the sum of a state times the gradient of the next one.
    """

    unit_q: torch.Tensor
    unit_k: torch.Tensor
    sums: torch.Tensor
    inverse: torch.Tensor
    states: torch.Tensor
    dstates: torch.Tensor
    residuals: torch.Tensor
    kept: torch.Tensor


class Passes(Protocol):
    """The launches of the passes.

    Attributes:
        kept: number of parts of ``Passed.kept``, a power of 2.
    """

    kept: int

    def run(
        self,
        inputs: Inputs,
        grad: torch.Tensor,
        grad_state: torch.Tensor | None,
        dv: torch.Tensor,
        initial: torch.Tensor | None,
    ) -> Passed:
        """Launch, and write ``dv``, and the gradient of the initial state; both gradients are contiguous."""
