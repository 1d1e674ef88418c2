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
    """Yield the calls for logits of a dtype: with the fewest arguments, with thresholds, and with all."""
    for rows in ROWS:
        ids, per_row, norm = empty(rows, dtype=torch.int64), empty(rows), empty(rows, 2)
        logits, scalar_inputs = empty(rows, WIDE, dtype=dtype), (ids, torch.tensor(1.0, device="cpu"), None, None, None)
        yield partial(backend.forward, logits, *scalar_inputs)
        yield partial(backend.backward, logits, *scalar_inputs, norm, None, per_row, None, None)
        kept_inputs = ids, per_row, None, None, per_row
        yield partial(backend.forward_stats, logits, *kept_inputs)
        yield partial(backend.backward, logits, *kept_inputs, norm, per_row, per_row, per_row, per_row)
        logits, row_inputs = empty(rows, RAGGED, dtype=dtype), (ids, per_row, -100, ids, per_row)
        yield partial(backend.forward_stats, logits, *row_inputs)
        yield partial(backend.backward_inplace, logits, *row_inputs, norm, per_row, per_row, per_row, per_row)
