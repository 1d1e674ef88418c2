"""Host code of both passes over chunks that gradients need: ``scan_sm90.cu`` with REPLAYS, and ``reverse_sm90.cu``."""

from __future__ import annotations

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import readable
from rl_kernels.gated_delta.backends.cuda_sm90.prefill import (
    AT_SUMS,
    CODES,
    ITEM,
    PACKAGE,
    PLACES,
    SCAN_ARGS,
    SIZE,
    STAGES,
    WIDTH,
    Plan,
    fits,
    scan_program,
)
from rl_kernels.gated_delta.constants import CHUNK
from rl_kernels.gated_delta.inputs import Inputs
from rl_kernels.gated_delta.passed import Passed

REVERSE_ARGS = f"T({PLACES}PPPPPPPPiifi)"
"""The tensor map of the gradient, and the layout of ``struct Args``."""
KEPT = 8
"""Sums of the state times its gradient of a chunk and value head."""


def reverse_program(dtype: torch.dtype, parts: int) -> Program:
    """Return the pass in descending order."""
    numbers = (("DTYPE", CODES[dtype]), ("PARTS", parts), ("STAGES", STAGES))
    return Program(PACKAGE, "reverse_sm90.cu", "sm_90a", numbers)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    forms = [(dtype, parts) for dtype in (torch.bfloat16, torch.float16) for parts in (1, 2) if arch == "sm_90a"]
    return [form for x in forms for form in (scan_program(*x, replays=True), reverse_program(*x))]


class Passes:
    """The launches up to the passes over chunks, for calls of one kind."""

    kept = KEPT

    def __init__(self, inputs: Inputs) -> None:
        q, device = inputs.q, inputs.q.device
        self._plan = plan = Plan(inputs, is_cached=False)
        self._replay = kernel(scan_program(q.dtype, plan.parts, replays=True), "scan", SCAN_ARGS, device)
        self._reverse = kernel(reverse_program(q.dtype, plan.parts), "reverse", REVERSE_ARGS, device)

    def run(
        self,
        inputs: Inputs,
        grad: torch.Tensor,
        grad_state: torch.Tensor | None,
        dv: torch.Tensor,
        initial: torch.Tensor | None,
    ) -> Passed:
        """Launch, and write ``dv``, and the gradient of the initial state; both gradients are contiguous."""
        plan, q = self._plan, inputs.q
        slots, (key_heads, heads) = plan.slots, plan.heads
        places, scale = plan.places(inputs), inputs.scale
        v, grad = readable(inputs.v, fits(inputs.v)), readable(grad, fits(grad))
        first = None if inputs.initial_state is None else inputs.initial_state.contiguous()
        unit_q, unit_k = (q.new_empty((slots, key_heads, CHUNK, SIZE)) for _ in range(2))
        states, dstates = (q.new_empty((slots, heads, SIZE, SIZE)) for _ in range(2))
        residuals = q.new_empty((slots, heads, CHUNK, SIZE))
        inverse = q.new_empty((slots, heads, CHUNK, CHUNK), dtype=torch.float32)
        kept = q.new_empty((slots, heads, KEPT), dtype=torch.float32)
        with device_of(q):
            held = (None, None, None)
            units, items = plan.prepare(inputs, places, held, (None, inverse, unit_q, unit_k))
            v_map, grad_map = (tensor_map(x, (1, CHUNK, 1, WIDTH), swizzle=128) for x in (v, grad))
            numbers, sizes = (*plan.heads, scale, 0), (plan.grid, plan.threads)
            passed = (units, items, None, first, *(None,) * 6, states, residuals)
            self._replay.launch(*sizes, v_map, *places, *passed, *numbers, shared=plan.shared)
            backward = (units, items, states, grad_state, initial, dv, dstates, kept)
            self._reverse.launch(*sizes, grad_map, *places, *backward, *numbers, shared=plan.shared)
        sums = items.view(slots, heads, ITEM)[..., AT_SUMS:].contiguous().view(torch.float32)
        return Passed(unit_q, unit_k, sums, inverse, states, dstates, residuals, kept)
