"""Activations whose result for an element does not depend on its position in the tensor, on a CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.observed import is_traced
from rl_kernels.core.validate import HALF_AND_FLOAT
from rl_kernels.models.subclasses import subclass


def _position_independent(base: type[nn.Module], function: Callable[..., torch.Tensor]) -> type[nn.Module]:
    """Return the subclass of an activation whose rounding on a CPU does not depend on an element's position."""
    original = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_on_cpu(args[0]):
            return _apply_in_fp32(function, args[0])
        return original(self, *args, **kwargs)

    return subclass(base, (function,), forward)


def _is_on_cpu(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dtype in HALF_AND_FLOAT


def _apply_in_fp32(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x.float()).to(x.dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    # Clamped at -80: otherwise the exponential and its gradient would overflow.
    return 1 / (1 + (-x.clamp(min=-80)).exp())


def _silu(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or is_traced() or forward_ad._current_level >= 0:
        return x / (1 + (-x).clamp(max=80).exp())
    if torch.is_grad_enabled() and x.requires_grad:
        result: torch.Tensor = _Silu.apply(x)
        return result
    return x / x.neg().clamp_(max=80).exp_().add_(1)


class _Silu(torch.autograd.Function):
    """SiLU that saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        save(ctx, x)
        return _silu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        # The steps that autograd takes for the formula above, so that a compiled model has the same bits.
        (x,) = ctx.saved_tensors
        exponential = (-x).clamp(max=80).exp()
        denominator = 1 + exponential
        return grad / denominator + torch.where(x < -80, 0.0, grad * (x / denominator / denominator) * exponential)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return SiLU with the bits of an ``nn.SiLU`` under ``invariant``."""
    return _apply_in_fp32(_silu, x) if _is_on_cpu(x) else F.silu(x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid with the bits of an ``nn.Sigmoid`` under ``invariant``."""
    return _apply_in_fp32(_sigmoid, x) if _is_on_cpu(x) else torch.sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return softplus of an FP32 tensor with the bits of an ``nn.Softplus`` under ``invariant``; without a gradient."""
    return _softplus(x) if _is_on_cpu(x) else F.softplus(x)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * _sigmoid(1.702 * x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form, with the bits of transformers' module under ``invariant``."""
    return _apply_in_fp32(_gelu_tanh, x) if _is_on_cpu(x) else F.gelu(x, approximate="tanh")


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _mish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(_softplus(x))


def _elu(x: torch.Tensor) -> torch.Tensor:
    # Clamped: otherwise the exponential and its gradient would overflow.
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))


def _selu(x: torch.Tensor) -> torch.Tensor:
    return 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * torch.expm1(x.clamp(max=0)))


_ACTIVATIONS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.SiLU: _silu, nn.Sigmoid: _sigmoid}
_ACTIVATIONS |= {nn.GELU: _gelu, nn.Softplus: _softplus, nn.Mish: _mish, nn.ELU: _elu, nn.CELU: _elu, nn.SELU: _selu}
_BY_NAME = {
    "SiLUActivation": _silu,
    "GELUActivation": _gelu,
    "GELUTanh": _gelu_tanh,
    "PytorchGELUTanh": _gelu_tanh,
    "QuickGELUActivation": _quick_gelu,
    "MishActivation": _mish,
    "SqrtSoftplusActivation": lambda x: torch.sqrt(_softplus(x)),
}
"""Activations of transformers to swap, by class name; other ones need no swap, or ``audit`` finds them."""
_DEFAULTS = {"alpha": 1.0, "beta": 1, "threshold": 20}
"""Default settings of ELU, CELU and Softplus; only modules with these are swapped."""


def is_activation(module: nn.Module) -> bool:
    """Say whether a module is an activation of PyTorch or transformers."""
    return type(module) in _ACTIVATIONS or type(module).__module__ == "transformers.activations"


def activation(module: nn.Module) -> tuple[type[nn.Module] | None, str]:
    """Return the class to swap in for an activation; or None and the reason, empty if no swap is needed."""
    function = _ACTIVATIONS.get(type(module)) or _BY_NAME.get(type(module).__name__)
    if function is None:
        return None, ""
    if getattr(module, "approximate", None) == "tanh":
        function = _gelu_tanh
    if any(getattr(module, name, value) != value for name, value in _DEFAULTS.items()):
        return None, f"on a CPU {type(module).__name__} with other settings than {_DEFAULTS} rounds by position"
    return _position_independent(type(module), function), ""
