"""Fixtures for tests, checker and benchmarks: operator specs, random inputs, RL batches, references, layouts."""

from rl_kernels.core.testing.batch import RLBatch, make_synthetic_rl_kernel_batch
from rl_kernels.core.testing.draw import Draw
from rl_kernels.core.testing.illegal import illegal_backends, illegal_ids, illegal_temperatures, with_main_grad
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
from rl_kernels.core.testing.storage import STORAGE, far, with_layout
from rl_kernels.core.testing.transforms import (
    IGNORED,
    RowLayout,
    as_int32,
    bad_ids,
    options,
    temperature_as_tensor,
)
from rl_kernels.core.ulps import INTEGERS, bits_of

__all__ = [
    "IGNORED",
    "INTEGERS",
    "STORAGE",
    "Case",
    "Chunks",
    "Draw",
    "Drift",
    "IllegalCall",
    "Inputs",
    "Layout",
    "Packed",
    "RLBatch",
    "RowLayout",
    "Spec",
    "Transform",
    "Variant",
    "as_int32",
    "bad_ids",
    "bits_of",
    "chunk",
    "drift",
    "edited",
    "far",
    "function_of",
    "given",
    "illegal_backends",
    "illegal_ids",
    "illegal_temperatures",
    "make_synthetic_rl_kernel_batch",
    "masked_mean",
    "masked_sum",
    "options",
    "pack",
    "pad",
    "permute",
    "poisoned_empty",
    "policy_ratio",
    "reference_kl",
    "selected_logprobs",
    "spec_of",
    "temperature_as_tensor",
    "torch_threads",
    "with_layout",
    "with_main_grad",
]
