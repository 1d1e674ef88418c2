"""Tokens sampled from given logits, and their log-probabilities with the bits of the Triton backend."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.constants import STEP
from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.linear_logp.backends.triton import given_kernels, kernels
from rl_kernels.linear_logp.backends.triton.backward import schedule_of
from rl_kernels.linear_logp.drawing import Request
from rl_kernels.linear_logp.inputs import STATE
from rl_kernels.linear_logp.triton_lib import sampling


@prepared
def sample(logits: torch.Tensor, norm: torch.Tensor, *rest: Any) -> Launches:
    """Return ids, their log-probabilities over the kept and over all entries, and min_logit."""
    (count, vocab), dtype = logits.shape, rest[-1]
    draw, cut = (
        sampling.launches_of(logits, norm, Request(*rest[:-1])),
        schedule_of("few_rows", logits.new_empty(0, dtype=dtype)),
    )
    units, sizes = ceil_div(vocab, kernels.UNIT.value), (count, vocab, logits.stride(0))
    grid = ceil_div(count, cut.rows), units
    states = Launch(given_kernels.given_states, grid, (*sizes, cut.rows, STEP), num_warps=cut.warps, num_stages=1)
    grid_of_rows = (ceil_div(count, kernels.ROWS.value),)
    finish = Launch(given_kernels.given_logp, grid_of_rows, (count, units, logits.stride(0)), num_warps=1)

    def launch(logits: torch.Tensor, norm: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        drawn, smallest = draw(logits, norm, Request(*rest[:-1]))
        logp, kept_logp = logits.new_empty(2, count)
        if count:
            parts = logits.new_empty(2, units, STATE, count)
            zeros = logits.new_zeros(STEP, dtype=dtype)
            with device_of(logits):
                states(logits, zeros, drawn.temperature, smallest, *parts)
                finish(logits, drawn.temperature, drawn.ids, *parts, logp, kept_logp)
        return drawn.ids, kept_logp, logp, drawn.min_logit

    return launch
