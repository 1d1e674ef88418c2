"""Modules that ``invariant`` does not swap, although they may compute something that depends on the batch."""

from __future__ import annotations

import inspect
import re

from torch import nn

from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.models.swap import original_of

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "rl_kernels")
"""Packages whose modules are known by their class, or are tested as part of a model."""
PRODUCTS = r"scaled_dot_product_attention|matmul|mm|bmm|addmm|baddbmm|einsum|softmax|log_softmax"
ACTIVATIONS = r"silu|gelu|sigmoid|tanh|softplus|mish"
"""Functions that round the last elements of a tensor differently on a CPU, as their modules do."""


def has_matrices(module: nn.Module) -> bool:
    """Say whether a module that is not swapped has matrices of its own, which it may multiply with."""
    known = isinstance(module, (DetLinear, nn.Embedding, nn.ParameterList, nn.ParameterDict))
    return not known and any(value.ndim > 1 for value in module.parameters(recurse=False))


def call_in_forward(module: nn.Module) -> str | None:
    """Return a function that a user's ``forward`` calls and whose bits depend on the shape of the batch, or None.

    The source is searched, so what a forward calls through other functions is not seen. Activations count on a CPU.
    """
    original = original_of(module)
    if original.__module__.partition(".")[0] in LIBRARIES:
        return None
    try:
        source = inspect.getsource(original.forward)
    except (OSError, TypeError):
        return None
    on_cpu = any(value.device.type == "cpu" for value in module.parameters())
    names = f"{PRODUCTS}|{ACTIVATIONS}" if on_cpu else PRODUCTS
    found = re.search(rf"\b(?:({names})|F\.(linear))\(| (@) ", source)
    return next((name for name in found.groups() if name), None) if found else None


def is_foreign_linear(module: nn.Module) -> bool:
    """Say whether a module looks like a linear layer that is not one of PyTorch's, such as a quantized one."""
    named = re.search(r"(linear|packedparams)$", type(module).__name__.lower())
    return named is not None and not isinstance(module, nn.Linear) and not any(True for _ in module.children())
