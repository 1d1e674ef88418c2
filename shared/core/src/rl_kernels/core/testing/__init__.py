"""Fixtures for tests, checker and benchmarks: operator specs, random inputs, RL batches, references, layouts."""

from rl_kernels.core.testing.draw import Draw
from rl_kernels.core.testing.spec import Case, IllegalCall, Inputs, Spec, Transform, Variant, spec_of
from rl_kernels.core.testing.transforms import IGNORED, RowLayout, options, strides

__all__ = [
    "IGNORED",
    "Case",
    "Draw",
    "IllegalCall",
    "Inputs",
    "RowLayout",
    "Spec",
    "Transform",
    "Variant",
    "options",
    "spec_of",
    "strides",
]
