"""det_attention in Triton: the launches of the forward and the backward pass.

The reduction order is the contract of this backend. Keys are counted from the first key of their sequence and taken in
blocks of 64. Each segment of 1024 keys has its own state, and states are merged in ascending order. A warp group
multiplies 64 keys at once with registers to spare at every head size. Segments of 1024 keys keep the merges below a few
percent of a prompt's time, and cut a cache of 32768 keys into enough programs to fill a GPU.
"""

from __future__ import annotations

from rl_kernels.attention.backends.triton import passes
from rl_kernels.attention.gpu import RawOps

_raw_ops = RawOps(passes)
forward, backward, planned = _raw_ops.forward, _raw_ops.backward, _raw_ops.planned
