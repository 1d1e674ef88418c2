"""Tokens sampled from given logits, and their log-probabilities with the bits of ``cuda-sm90``."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.layout import ALIGNED
from rl_kernels.linear_logp.backends.cuda_sm90 import sampling
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import FORWARD, Cut, program
from rl_kernels.linear_logp.drawing import Request
from rl_kernels.linear_logp.inputs import STATE
from rl_kernels.linear_logp.vocabulary import units

GIVEN = "(PPPPPPqii)"
"""Layout of ``struct Given``."""
ROWS, THREADS = 8, 128
"""Rows and threads of a block of ``given_states``."""
FINISHED, FINISH_THREADS = 4, 256
"""Rows and threads of a block of ``given_logp``."""


def by_quads(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of which kernels read four numbers at once: a copy unless rows begin at multiples of 16 bytes."""
    count, vocab = logits.shape
    if logits.stride(1) == 1 and not (logits.stride(0) * logits.itemsize | logits.data_ptr()) % ALIGNED:
        return logits
    return logits.new_empty(count, -(-vocab // 4) * 4)[:, :vocab].copy_(logits)


@prepared
def sample(logits: torch.Tensor, norm: torch.Tensor, *rest: Any) -> Launches:
    """Return ids, their log-probabilities over the kept and over all entries, and min_logit."""
    (count, vocab), draw = logits.shape, sampling.launches_of(logits, Request(*rest[:-1]))
    # The kernels depend on neither the dtype of the operands nor the tiles.
    compiled = program(FORWARD, torch.bfloat16, Cut(1), entropy=False)
    states, finish = (kernel(compiled, name, GIVEN, logits.device) for name in ("given_states", "given_logp"))

    def launch(logits: torch.Tensor, norm: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        logits = by_quads(logits)
        drawn, smallest = draw(logits, norm, Request(*rest[:-1]))
        logp, parts = logits.new_empty(2, count), logits.new_empty(2, units(vocab), STATE, count)
        if count:
            inputs = logits, drawn.temperature, smallest, drawn.ids, parts, logp
            numbers = *[x.data_ptr() for x in inputs], logits.stride(0), count, vocab
            states.start((-(-count // ROWS), units(vocab), 1), THREADS, 0, True, numbers)
            finish.start((-(-count // FINISHED), 1, 1), FINISH_THREADS, 0, True, numbers)
        return drawn.ids, logp[1], logp[0], drawn.min_logit

    return launch
