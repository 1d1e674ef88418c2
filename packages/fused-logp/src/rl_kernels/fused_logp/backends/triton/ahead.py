"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.fused_logp.backends.triton import backend

ROWS = (16, backend.SPLIT_BELOW)
"""A program for each segment of a row, and one for a whole row."""
WIDE, RAGGED = 152064, 151643
"""Vocabularies with and without wide loads."""


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for logits of a dtype: with the fewest arguments, and with all."""
    for rows in ROWS:
        ids, each, norm = empty(rows, dtype=torch.int64), empty(rows), empty(rows, 2)
        logits, few = empty(rows, WIDE, dtype=dtype), (ids, torch.tensor(1.0, device="cpu"), None, None)
        yield partial(backend.forward, logits, *few)
        yield partial(backend.backward, logits, *few, norm, None, each, None, None)
        logits, many = empty(rows, RAGGED, dtype=dtype), (ids, each, -100, ids)
        yield partial(backend.forward_stats, logits, *many)
        yield partial(backend.backward_inplace, logits, *many, norm, each, each, each, each)
