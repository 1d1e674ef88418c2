"""Modules that ``invariant`` does not swap, although they may compute something that depends on the batch."""

from __future__ import annotations

import inspect
import re

from torch import nn

from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.models.swap import original_of

LIBRARIES = ("torch", "rl_kernels")
"""Packages whose modules are known by their class."""
PRODUCTS = (
    r"scaled_dot_product_attention|matmul|mm|bmm|addmm|baddbmm|einsum|softmax|log_softmax|conv1d|"
    r"causal_conv1d_\w+|\w*(?:chunk|recurrent)_\w*delta_rule"
)
"""Functions whose sums have an order that follows from the shape, or from where a sequence was cut."""
ACTIVATIONS = r"silu|gelu|sigmoid|softplus|mish|elu|selu|celu|exp2"
"""Functions that round the last elements of a tensor differently on a CPU, as their modules do."""


def why_unknown(module: nn.Module) -> str | None:
    """Return the reason why a module that is not swapped may depend on the batch, or None."""
    # The weights that a parametrization computes do not depend on the batch.
    independent = (DetLinear, nn.Embedding, nn.utils.parametrize.ParametrizationList)
    if isinstance(module, independent) or _has_no_forward(module):
        return None
    kind = original_of(module).__name__
    if _has_matrices(module):
        return f"{kind} has matrices of its own, and it is not known how it multiplies by them"
    variants = getattr(module, "lora_variant", None)
    if variants:
        return f"{kind} has an adapter that is not plain LoRA: {type(next(iter(variants.values()))).__name__}"
    called = _call_in_forward(module)
    if called is not None:
        return f"its forward calls {called}; use det_attention, nn.Linear and modules for activations"
    return None


def _has_no_forward(module: nn.Module) -> bool:
    """Say whether a module has no forward: what it holds, such as a ``ParameterDict``, is used by its parent."""
    return type(module).forward is nn.Module.forward


def _has_matrices(module: nn.Module) -> bool:
    """Say whether a module has matrices of its own; one row or column, such as a scale ``[1, D]``, is none."""
    holders = [module, *(child for child in module.children() if _has_no_forward(child))]
    values = [value for holder in holders for value in holder.parameters(recurse=False)]
    return any(sum(size > 1 for size in value.shape) > 1 for value in values)


def _call_in_forward(module: nn.Module) -> str | None:
    """Return the name of a called function whose bits depend on the shape of the batch, or None.

    The source is searched, so what a forward calls through other functions is not seen; children are modules of their
    own. Activations count on a CPU.
    """
    original = original_of(module)
    library = original.__module__.partition(".")[0]
    devices = {value.device.type for value in module.parameters()}
    # transformers' modules without weights are rotary embeddings, whose products have one term.
    if library in LIBRARIES or (library == "transformers" and not devices):
        return None
    try:
        source = inspect.getsource(original.forward)
    except (OSError, TypeError):
        return None
    names = f"{PRODUCTS}|{ACTIVATIONS}" if "cpu" in devices else PRODUCTS
    code = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    match = re.search(rf"(?<!self\.)\b(?:({names})|(?:F|functional)\.(linear))\(| (@) ", code)
    return next((name for name in match.groups() if name), None) if match else None


def is_foreign_linear(module: nn.Module) -> bool:
    """Say whether a module looks like a linear layer that is not one of PyTorch's, such as a quantized one."""
    named = re.search(r"(linear|packedparams)$", type(module).__name__.lower())
    return named is not None and not isinstance(module, nn.Linear) and not any(True for _ in module.children())
