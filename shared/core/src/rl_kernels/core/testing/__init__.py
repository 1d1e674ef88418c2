"""Fixtures for tests, checker and benchmarks: operator specs, random inputs, RL batches, references, layouts."""

from rl_kernels.core.testing.batch import RLBatch, make_synthetic_rl_kernel_batch
from rl_kernels.core.testing.draw import Draw
from rl_kernels.core.testing.layouts import Chunks, Layout, Packed, chunk, pack, pad, permute
from rl_kernels.core.testing.references import (
    Drift,
    drift,
    masked_mean,
    masked_sum,
    policy_ratio,
    reference_kl,
    selected_logprobs,
)
from rl_kernels.core.testing.spec import (
    IGNORED,
    Case,
    IllegalCall,
    Inputs,
    Spec,
    Transform,
    Variant,
    edited,
    function_of,
    given,
    spec_of,
)
from rl_kernels.core.testing.state import poisoned_empty, torch_threads
from rl_kernels.core.testing.storage import far, with_layout
from rl_kernels.core.ulps import INTEGERS, bits_of

__all__ = [
    "IGNORED",
    "INTEGERS",
    "Case",
    "Chunks",
    "Draw",
    "Drift",
    "IllegalCall",
    "Inputs",
    "Layout",
    "Packed",
    "RLBatch",
    "Spec",
    "Transform",
    "Variant",
    "bits_of",
    "chunk",
    "drift",
    "edited",
    "far",
    "function_of",
    "given",
    "make_synthetic_rl_kernel_batch",
    "masked_mean",
    "masked_sum",
    "pack",
    "pad",
    "permute",
    "poisoned_empty",
    "policy_ratio",
    "reference_kl",
    "selected_logprobs",
    "spec_of",
    "torch_threads",
    "with_layout",
]
