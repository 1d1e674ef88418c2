"""Modules that ``invariant`` does not swap, although they may compute something that depends on the batch."""

from __future__ import annotations

import inspect
import re

from torch import nn

from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.models.swap import original_of

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "rl_kernels")
"""Packages whose modules are known by their class, or are tested as part of a model."""
PRODUCTS = re.compile(
    r"\b(?:scaled_dot_product_attention|matmul|mm|bmm|addmm|baddbmm|einsum|softmax|log_softmax)\(|\bF\.linear\(| @ "
)
"""Calls in a forward whose bits depend on the shape of the batch."""


def is_unknown(module: nn.Module) -> bool:
    """Say whether a module that is not swapped may depend on the batch.

    It may if it has matrices of its own, or if the source of its ``forward`` calls a product, a softmax or an
    attention. What a forward calls through other functions is not seen.
    """
    known = isinstance(module, (DetLinear, nn.Embedding, nn.ParameterList, nn.ParameterDict))
    if not known and any(value.ndim > 1 for value in module.parameters(recurse=False)):
        return True
    original = original_of(module)
    if original.__module__.partition(".")[0] in LIBRARIES:
        return False
    try:
        source = inspect.getsource(original.forward)
    except (OSError, TypeError):
        return False
    return PRODUCTS.search(source) is not None


def is_foreign_linear(module: nn.Module) -> bool:
    """Say whether a module looks like a linear layer that is not one of PyTorch's, such as a quantized one."""
    named = re.search(r"(linear|packedparams)$", type(module).__name__.lower())
    return named is not None and not isinstance(module, nn.Linear) and not any(True for _ in module.children())
