"""The modules of a model to swap, and the subclass for each, which differs in ``forward`` alone."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from rl_kernels.core.validate import HALF_AND_FLOAT
from rl_kernels.det_gemm.api import det_linear
from rl_kernels.det_gemm.module import DetLinear
from rl_kernels.models import hybrids, mixtures
from rl_kernels.models.activations import activation, is_activation
from rl_kernels.models.decode import FORM, decoder_layer
from rl_kernels.models.fused.embedding import OrderedEmbedding
from rl_kernels.models.fused.swaps import gated
from rl_kernels.models.subclasses import subclass
from rl_kernels.models.swap import SWAPPED, calls_own_forward, shallow_copy
from rl_kernels.models.unknown import is_foreign_linear
from rl_kernels.norm import LayerNorm, RMSNorm, layer_norm, rms_norm


class Form(NamedTuple):
    """The norm that a module computes, as arguments of ``rms_norm``; ``centered`` means ``layer_norm``."""

    centered: bool
    offset: float
    cast_first: bool


FORMS = (
    Form(centered=False, offset=0.0, cast_first=True),  # Llama, Qwen
    Form(centered=False, offset=0.0, cast_first=False),  # gpt-oss, and torch
    Form(centered=False, offset=1.0, cast_first=False),  # Gemma
    Form(centered=True, offset=0.0, cast_first=False),  # Cohere, and every LayerNorm
)
EPS = ("variance_epsilon", "eps", "epsilon")
"""Names of the attribute that holds a norm's epsilon."""
AGREES = 0.98
"""Smallest share of a probe's elements with equal bits that identifies a norm; another order of sums changes a few."""

Replacement = tuple[type[nn.Module] | None, str]
"""The class to swap in, or None and the reason not to swap; an empty reason says that no swap is needed."""
NO_SWAP: Replacement = (None, "")


def replacement(module: nn.Module) -> Replacement:
    """Return the class that makes a module batch-invariant, or the reason to leave it alone."""
    if hasattr(type(module), SWAPPED):
        # A module of a copied swapped model: the new handle can undo its swap.
        return next(kind for kind in type(module).__mro__ if SWAPPED in vars(kind)), ""
    if isinstance(module, (DetLinear, LayerNorm, RMSNorm)):
        return NO_SWAP
    result = NO_SWAP
    if (known := mixtures.part(module) or hybrids.part(module)) is not None:
        result = known
    elif isinstance(module, nn.Linear):
        result = _linear(module)
    elif is_foreign_linear(module):
        result = None, f"{type(module).__name__} is not an nn.Linear; it may be quantized"
    elif type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        result = subclass(type(module), (), _conv1d), ""
    elif isinstance(module, nn.Embedding):
        # An embedding with a custom forward or weight gets no warning: it does not depend on the batch.
        is_plain = calls_own_forward(module) and not nn.utils.parametrize.is_parametrized(module)
        result = (_embedding(type(module)), "") if is_plain else NO_SWAP
    elif isinstance(module, nn.MultiheadAttention):
        result = None, "nn.MultiheadAttention computes its products itself"
    elif is_activation(module):
        result = activation(module)
    elif "norm" in type(module).__name__.lower():
        result = _norm(module)
    elif (forward := gated(module)) is not None:
        result = subclass(type(module), (), forward), ""
    elif (forward := decoder_layer(module)) is not None:
        result = subclass(type(module), (), forward, name=type(module).__name__), ""
    if result[0] is not None and not calls_own_forward(module) and not mixtures.is_cut(module):
        return None, "its forward was replaced on the object, so swapping its class has no effect"
    return result


def _linear(module: nn.Linear) -> Replacement:
    sharded = _sharded_class(type(module))
    if sharded is nn.Linear:
        return subclass(type(module), (), DetLinear.forward, bases=(type(module), DetLinear)), ""
    if type(module) is not nn.Linear:
        return None, f"{type(module).__name__} is a subclass of nn.Linear that may compute something else"
    if module.weight.dtype not in HALF_AND_FLOAT:
        return None, f"its weight is {module.weight.dtype}; det_linear takes FP32, BF16 and FP16"
    return subclass(DetLinear, (), DetLinear.forward, nn.Linear), ""


def _sharded_class(kind: type[nn.Module]) -> type | None:
    """Return the class that FSDP2 put its own on, or None."""
    first, *rest = kind.__bases__
    return rest[0] if rest and first.__name__ == "FSDPModule" else None


def _embedding(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that overrides ``nn.Embedding.forward``; Gemma's subclass still scales its result."""
    if base is nn.Embedding:
        return subclass(base, (), OrderedEmbedding.forward, bases=(OrderedEmbedding,))
    return subclass(base, (), None, bases=(base, OrderedEmbedding))


def _conv1d(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the ``Conv1D`` of transformers, GPT-2's linear layer with a transposed weight."""
    return det_linear(x, self.weight.t(), self.bias)


def _norm(module: nn.Module) -> Replacement:
    if next(module.children(), None) is not None:
        return NO_SWAP
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and type(module) in (nn.LayerNorm, nn.RMSNorm):
        if len(module.normalized_shape) != 1:
            return None, "it normalizes over several dims"
        return row_wise(type(module), FORMS[3] if type(module) is nn.LayerNorm else FORMS[1], "eps"), ""
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)):
        return None, f"{type(module).__name__} is PyTorch's, over the batch or in an order of its own"
    eps = next((name for name in EPS if isinstance(getattr(module, name, None), float)), None)
    shapes = {name: value.ndim for name, value in module.named_parameters()}
    # A forward with more arguments than self, rows and a gate computes more than a norm.
    arguments = list(inspect.signature(type(module).forward).parameters)
    is_gated = arguments[2:] == ["gate"]
    if eps is None or not (is_gated or len(arguments) == 2) or shapes not in ({}, {"weight": 1}):
        return None, f"{type(module).__name__} is an unknown kind of norm"
    form = _recognized(module, eps, is_gated)
    if form is None:
        return None, f"{type(module).__name__} is an unknown kind of norm"
    return (_gated if is_gated else row_wise)(type(module), form, eps), ""


def _recognized(module: nn.Module, eps: str, is_gated: bool = False) -> Form | None:
    """Return the form of a norm, recognized by its result for random rows, a random weight and a random gate."""
    generator = torch.Generator().manual_seed(0)
    weight = getattr(module, "weight", None)
    width = 256 if weight is None else weight.shape[0]
    # A copy with its own parameters; no hook runs, because the forward of the class is called directly.
    twin = shallow_copy(module)
    twin.__dict__["_parameters"] = {}
    probe = torch.randn(4, width, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    scale = None
    if weight is not None:
        scale = (0.5 + torch.rand(width, generator=generator, dtype=torch.float32, device="cpu")).bfloat16()
        twin.__dict__["_parameters"]["weight"] = nn.Parameter(scale, requires_grad=False)
    gate = (
        torch.randn(4, width, generator=generator, dtype=torch.float32, device="cpu").bfloat16() if is_gated else None
    )
    try:
        with torch.no_grad():
            expected = type(module).forward(twin, probe, *([gate] if is_gated else []))
    except Exception:  # it takes more than rows, so it is another kind of norm
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != probe.shape:
        return None
    options: dict[str, Any] = {"backend": "native"} | ({"gate": gate} if is_gated else {})
    forms = [form for form in FORMS if not (is_gated and form.centered)]
    results = {form: norm(probe, scale, None, getattr(module, eps), form, **options) for form in forms}
    shares = {form: _matching_share(result, expected) for form, result in results.items()}
    best = max(forms, key=shares.__getitem__)
    return best if shares[best] >= AGREES else None


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: Form,
    gate: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return a norm of ``x[..., D]``, without a mean times ``silu(gate)`` if there is a gate."""
    if form.centered:
        return layer_norm(x, weight, bias, eps=eps, backend=backend)
    return rms_norm(x, weight, gate=gate, eps=eps, offset=form.offset, cast_first=form.cast_first, backend=backend)


def _matching_share(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result == expected).double().mean()) if result.dtype == expected.dtype else 0.0


def row_wise(base: type[nn.Module], form: Form, eps: str) -> type[nn.Module]:
    """Return the subclass of a norm that computes each row independently."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        epsilon = getattr(self, eps)
        if epsilon is None:
            epsilon = torch.finfo(x.dtype).eps
        return norm(x, getattr(self, "weight", None), getattr(self, "bias", None), epsilon, form)

    setattr(forward, FORM, (form, eps))
    return subclass(base, (form, eps), forward)


def _gated(base: type[nn.Module], form: Form, eps: str) -> type[nn.Module]:
    """Return the subclass of a gated norm that computes each row independently."""

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return norm(hidden_states, getattr(self, "weight", None), None, getattr(self, eps), form, gate)

    return subclass(base, (form, eps), forward)
