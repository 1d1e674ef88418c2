"""Host code of the backward pass: ``prepare_sm90.cu`` again, then ``replay_sm90.cu`` and ``reverse_sm90.cu``."""

from __future__ import annotations

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.gated_delta.backends.cuda_sm90.prefill import (
    BOX,
    CODES,
    ITEM,
    PLACES,
    SIZE,
    STAGES,
    UNITS,
    WIDTH,
    Chunks,
    pass_program,
    prepare_program,
    whole,
)
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import Inputs
from rl_kernels.gated_delta.triton_lib.backward import Chunks as Passed

REPLAY_ARGS, REVERSE_ARGS = f"TTT({PLACES}PPPii)", f"TTT({PLACES}PPPPPPiifi)"
"""Tensor maps, then layouts of the kernels' ``struct Args``."""
FEW = 2
"""Chunks in the ring of ``reverse``."""


def replay_program(dtype: torch.dtype, parts: int) -> Program:
    """Return the pass that writes states and residuals."""
    return pass_program("replay_sm90.cu", dtype, parts)


def reverse_program(dtype: torch.dtype, parts: int) -> Program:
    """Return the pass over chunks in descending order."""
    return pass_program("reverse_sm90.cu", dtype, parts, FEW)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    halves = [x for x in CODES if x != torch.float32] if arch == "sm_90a" else []
    forms = (replay_program, reverse_program)
    passes = [form(x, parts) for x in halves for form in forms for parts in (1, 2)]
    return [*(prepare_program(x, for_gradients=True) for x in halves), *passes]


class Passes(Chunks):
    """The launches for calls of one kind.

    Args:
        inputs: the arguments of forward.
    """

    kept = SIZE // 16
    """Sums for a chunk and value head: one for each warp, which has 16 value columns."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, for_gradients=True)
        if self.is_empty:
            return
        q, parts = inputs.q, self._parts
        self.sizes = (*self._heads, SIZE, SIZE)
        q_strides, k_strides = (
            (x if fit else x.new_empty(x.shape)).stride()[:3] for x, fit in zip(inputs[:2], self._fits, strict=False)
        )
        self.strides = q_strides, k_strides
        self._replay = kernel(replay_program(q.dtype, parts), "replay", REPLAY_ARGS, q.device)
        self._reverse = kernel(reverse_program(q.dtype, parts), "reverse", REVERSE_ARGS, q.device)
        # k, v, and the item without M; a state and residuals beside the ring. q, k, do, the item, and a state.
        self._replay_shared = STAGES * whole((1 + parts) * BOX + ITEM) + 3 * parts * BOX + 1024
        self._reverse_shared = FEW * (whole(UNITS + parts * BOX + ITEM) + 2 * parts * BOX) + 1024

    def run(
        self,
        inputs: Inputs,
        grad: torch.Tensor,
        grad_state: torch.Tensor | None,
        dv: torch.Tensor,
        initial: torch.Tensor | None,
    ) -> Passed:
        """Launch, and write the gradients of v, and of the initial state unless it is None."""
        q, slots, (key_heads, heads) = inputs.q, self.slots, self._heads
        unit_q, unit_k = (q.new_empty((slots, key_heads, CHUNK, SIZE)) for _ in range(2))
        sums = q.new_empty((slots, heads, CHUNK), dtype=torch.float32)
        inverse = sums.new_empty((slots, heads, CHUNK, CHUNK))
        places = self._places(inputs)
        units, items = self._launch_prepare(inputs, places, others=(unit_q, unit_k, sums, inverse))
        states, dstates = (q.new_empty((slots, heads, SIZE, SIZE)) for _ in range(2))
        residuals, kept = q.new_empty((slots, heads, CHUNK, SIZE)), sums.new_empty((slots, heads, self.kept))
        rows = (tensor_map(x, (1, CHUNK, 1, WIDTH), swizzle=128) for x in (inputs.v, grad))
        tiles = (tensor_map(x.view(-1, SIZE), (CHUNK, WIDTH), swizzle=128) for x in (states, residuals, dstates))
        v_map, grad_map = rows
        states_map, residuals_map, dstates_map = tiles
        self._replay.launch(
            self._grid, self._threads, v_map, states_map, residuals_map, *places, units, items, inputs.initial_state,
            *self._heads, shared=self._replay_shared,
        )  # fmt: skip
        self._reverse.launch(
            self._grid, self._threads, grad_map, states_map, dstates_map, *places, units, items, grad_state, initial,
            kept, dv, *self._heads, inputs.scale, 0, shared=self._reverse_shared,
        )  # fmt: skip
        return Passed(unit_q, unit_k, sums, inverse, states, dstates, residuals, kept)
