"""Tensor, sequence and expert parallelism for models of transformers, with the bits of one process."""

from rl_kernels.models.parallel.clipping import clip_grad_norm
from rl_kernels.models.parallel.context import parallelize_context
from rl_kernels.models.parallel.experts import parallelize_experts
from rl_kernels.models.parallel.model import Parallel, parallelize
from rl_kernels.models.parallel.states import full_state_dict, load_full_state_dict
from rl_kernels.models.parallel.styles import ColumnParallel, HeadNorm, RowParallel, TokenNorm, VocabParallel

__all__ = [
    "ColumnParallel",
    "HeadNorm",
    "Parallel",
    "RowParallel",
    "TokenNorm",
    "VocabParallel",
    "clip_grad_norm",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize",
    "parallelize_context",
    "parallelize_experts",
]
