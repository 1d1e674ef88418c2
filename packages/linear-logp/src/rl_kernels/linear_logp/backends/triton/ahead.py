"""Calls that launch every kernel of the backend, without data; ``rl-kernels compile`` compiles what they launch.

Products are core's, compiled as det_gemm's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rl_kernels.core.triton_lib.ahead import empty
from rl_kernels.linear_logp.backends.triton import backend
from rl_kernels.linear_logp.inputs import packed_room

SIZE, VOCAB, RAGGED = 2048, 32768, 32001
ROWS = (16, 4096)
"""Blocks of the vocabulary for each program, and whole units."""
KEPT_MIB = 1024


def calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Yield the calls for operands of a dtype: with the fewest arguments, and with all."""
    for rows in ROWS:
        each, norm, ids = empty(rows), empty(rows, 2), empty(rows, dtype=torch.int64)
        hidden, weight, bias = empty(rows, SIZE, dtype=dtype), empty(VOCAB, SIZE, dtype=dtype), empty(RAGGED)
        few = (hidden, weight, ids, None, torch.tensor(1.0, device="cpu"), None, None, None)
        cap = torch.tensor([30.0, 0.03], device="cpu")
        many = (hidden, weight[:RAGGED], ids, bias.to(dtype), each, -100, cap, each)
        yield partial(backend.forward, *few, KEPT_MIB)
        yield partial(backend.forward_stats, *many, None)
        gradients = (0, VOCAB, 1, False, None, 1024, [True, True, False], None, False)
        kept = empty(rows, VOCAB)
        yield partial(backend.backward, *few, norm, None, kept, each, None, None, *gradients)
        gradients = (0, RAGGED, 1, False, None, 1024, [True, True, True], None, False)
        yield partial(backend.backward, *many, norm, each, None, each, each, each, *gradients)
        uniform, limit, logits = empty(rows, dtype=torch.float64), torch.tensor(3.0, device="cpu"), empty(rows, VOCAB)
        yield partial(backend.sample, logits, norm, limit, None, None, limit, uniform, dtype)
        yield partial(backend.sample, logits, norm, each, each, None, None, uniform, dtype)
        yield partial(backend.sample, logits, norm, limit, None, limit, None, uniform, dtype)
        yield partial(backend.sample, logits[:, :RAGGED], norm, each, each, each, each, uniform, dtype)
    packed = packed_room(hidden, 4, entropy=True)[0]
    gathered = packed.new_empty((2, *packed.shape))
    yield partial(backend.finish, gathered, ids, each, -100, RAGGED, True)
