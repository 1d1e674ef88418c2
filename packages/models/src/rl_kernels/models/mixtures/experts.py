"""The experts of a mixture: a module of transformers' experts interface, computed by the operator ``experts``.

transformers' decorator ``use_experts_implementation`` marks such a class with flags: whether it has a gate and biases,
and the layout of its weights. The activation is recognized by its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_kernels.core.validate import HALF_AND_FLOAT
from rl_kernels.models.mixtures.dispatch import implementation_of, is_cut
from rl_kernels.models.mixtures.ranks import RANKS
from rl_kernels.models.subclasses import subclass
from rl_kernels.models.swap import shallow_copy
from rl_kernels.moe import experts
from rl_kernels.moe.activations import NAMES, activate
from rl_kernels.moe.reference import split

FLAGS = ("has_gate", "has_bias", "is_transposed")
"""Attributes that transformers' decorator sets."""
WEIGHTS = ("gate_up_proj", "down_proj")
AGREES = 0.98
"""Smallest share of a probe's elements with equal bits; on a CPU PyTorch rounds a few activations differently."""
NEEDED = "needs a transformers with ALL_EXPERTS_FUNCTIONS and use_experts_implementation, such as 5.17"


def is_experts(module: nn.Module) -> bool:
    """Say whether a module holds the experts of a mixture, by its flags or its name."""
    kind = type(module)
    return _has_flags(module) or (kind.__name__.endswith("Experts") and kind.__module__.startswith("transformers."))


def experts_module(module: Any) -> tuple[type[nn.Module] | None, str]:
    """Return the class whose forward is the operator ``experts``, or None and the reason against it."""
    kind = type(module).__name__
    reason = _why_not(module)
    if reason is not None:
        return None, f"{kind}: {reason}"
    known = _activation(module)
    if known is None:
        return None, f"{kind}: its activation is none of {', '.join(NAMES)}"
    activation, interleaved = known
    has_bias, transposed = bool(module.has_bias), bool(module.is_transposed)

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if has_bias else (None, None)
        weights, ranks = (self.gate_up_proj, self.down_proj, *biases), vars(self).get(RANKS)
        options: dict[str, Any] = {}
        if ranks is not None:
            # transformers makes them local itself.
            weights = tuple(x.to_local() if hasattr(x, "to_local") else x for x in weights)
            options = {"process_group": ranks.group, "num_experts": ranks.count}
        out = experts(
            *(hidden_states, *weights[:2], top_k_index, top_k_weights),
            gate_up_bias=weights[2],
            down_bias=weights[3],
            activation=activation,
            interleaved=interleaved,
            transposed=transposed,
            **options,
        )
        # Under autocast a model's own experts return the dtype of their input too.
        return out if out.dtype == hidden_states.dtype else out.to(hidden_states.dtype)

    return subclass(type(module), (activation, interleaved, has_bias, transposed), forward), ""


def _has_flags(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in FLAGS)


def _why_not(module: Any) -> str | None:
    if not _has_flags(module):
        try:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: F401
        except ImportError:
            return f"{NEEDED}: the installed one has no experts interface"
        return f"its weights are quantized, or it does not go through transformers' experts interface; {NEEDED}"
    if not module.has_gate:
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalizes the output of each expert"
    if is_cut(module) and implementation_of(module) is None:
        return "transformers spreads its experts over ranks in an unknown way; load it without, use parallelize_experts"
    weights = [getattr(module, name, None) for name in WEIGHTS]
    if any(value is None or value.ndim != len("EFD") or value.dtype not in HALF_AND_FLOAT for value in weights):
        dtypes = {str(getattr(value, "dtype", "missing")) for value in weights}
        return f"its weights are {', '.join(sorted(dtypes))}; experts takes FP32, BF16 and FP16, not quantized ones"
    return None


def _activation(module: Any) -> tuple[str, bool] | None:
    """Return the name of the activation and whether gate and up alternate, recognized by random rows; or None."""
    generator = torch.Generator().manual_seed(0)
    # Wide enough that some elements lie outside of a clamp.
    probe = 4 * torch.randn(64, 64, generator=generator, dtype=torch.float32, device="cpu")
    probe = probe.bfloat16()
    twin = shallow_copy(module)
    twin.__dict__["_parameters"] = {}
    try:
        with torch.no_grad():
            expected = type(module)._apply_gate(twin, probe)
    except Exception:  # its gate takes more than rows
        return None
    for name in NAMES:
        for interleaved in (False, True):
            result = activate(*split(probe, interleaved), name)
            if result.shape == expected.shape and float((result == expected).double().mean()) >= AGREES:
                return name, interleaved
    return None
