"""Find the code of transformers models that a fused kernel can replace: by its results, not by its name alone."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_kernels.models.fused import gate, rotary
from rl_kernels.models.swap import SWAPPED, Undo, calls_own_forward

ROTARY = "apply_rotary_pos_emb"
"""Name of the function in a modeling file that its attention calls."""
PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Hook attributes of a module; hooks must still be called."""
PROBE: Any = {"dtype": torch.float32, "device": "cpu"}
"""Independent of the default dtype and device."""
_swapped: set[Callable[..., Any]] = set()
"""The functions that ``rotary_swap`` has set."""


def rotary_module(part: nn.Module) -> ModuleType | None:
    """Return the modeling file of a ``PreTrainedModel`` if its rotary embedding computes the formula of ``rotary``."""
    module = sys.modules.get(type(part).__module__)
    function = getattr(module, ROTARY, None)
    return module if function is not None and _rotates_halves(function, torch.float32) else None


def _rotates_halves(function: Callable[..., Any], dtype: torch.dtype, rest: int = 0) -> bool:
    """Say whether a function rotates queries and keys of a dtype by FP32 angles with exactly our formula.

    ``rest``: numbers of a head, behind those with an angle, that it leaves as they are.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator, **PROBE)
        for shape in ((1, 2, 3, 8 + rest), (1, 1, 3, 8 + rest), (1, 3, 8), (1, 3, 8))
    )
    q, k = q.to(dtype), k.to(dtype)
    halves = [torch.cat((-x[..., 4:8], x[..., :4]), -1) for x in (q, k)]
    rotated = [x[..., :8] * cos[:, None] + half * sin[:, None] for x, half in zip((q, k), halves, strict=True)]
    expected = [torch.cat((x, other[..., 8:]), -1) for x, other in zip(rotated, (q, k), strict=True)]
    try:
        result = function(q, k, cos, sin)
        pairs = list(zip(result, expected, strict=True))
        return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    except Exception:  # it takes other arguments, so it is another function
        return False


def rotary_swap(module: ModuleType) -> Undo:
    """Swap the rotary function of a modeling file for ``rotary``; this affects all its models, but changes no bit."""
    original = getattr(module, ROTARY)
    # Olmo's function returns the dtype of q and k, whatever the dtype of the angles.
    promotes = _rotates_halves(original, torch.bfloat16)
    # Some functions rotate the first numbers of a head alone, others take whole heads only.
    takes_part = _rotates_halves(original, torch.float32, rest=4)

    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **options: Any) -> Any:
        is_known = not args and not options and rotary.takes(q, k, cos, sin)
        if not (is_known and (promotes or q.dtype == cos.dtype) and (takes_part or q.shape[-1] == cos.shape[-1])):
            return original(q, k, cos, sin, *args, **options)
        return rotary.rotary(q, k, cos, sin)

    _swapped.add(apply)
    setattr(module, ROTARY, apply)

    def undo(module: ModuleType) -> None:
        _swapped.discard(apply)
        if getattr(module, ROTARY) is apply:
            setattr(module, ROTARY, original)

    return undo


def rotates_as_ours(module: ModuleType) -> bool:
    """Say whether the rotary function of a modeling file is the one that ``rotary_swap`` has set."""
    return vars(module).get(ROTARY) in _swapped


def gated(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return a forward with a fused gate for an MLP with a SiLU gate; None for any other module."""
    if dict(module.named_children()).keys() != PARTS or not is_silu(type(module.act_fn)):
        return None
    twin = copy.copy(module)
    scales = {"gate_proj": 0.5, "up_proj": -1.5, "down_proj": 2.0}
    twin.__dict__["_modules"] = {**{name: Scaled(factor) for name, factor in scales.items()}, "act_fn": nn.SiLU()}
    probe = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), **PROBE)
    try:
        with torch.no_grad():
            result = type(module).forward(twin, probe)
    except Exception:  # it takes more than rows, so it is another kind of MLP
        return None
    expected = F.silu(probe * 0.5) * (probe * -1.5) * 2.0
    return _gated_forward if isinstance(result, torch.Tensor) and torch.equal(result, expected) else None


def _gated_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = self.gate_proj(x), self.up_proj(x)
    if gate.takes(left, right) and is_silu(type(self.act_fn)) and not _has_hooks(self.act_fn):
        return self.down_proj(gate.silu_mul(left, right))
    return self.down_proj(self.act_fn(left) * right)


def is_gated(kind: type[nn.Module]) -> bool:
    """Say whether a class is that of an MLP whose forward ``gated`` has swapped."""
    return getattr(kind.forward, "__wrapped__", None) is _gated_forward


def is_silu(kind: type) -> bool:
    """Say whether a class is SiLU, swapped or not; other subclasses may compute something else."""
    kind = getattr(kind, SWAPPED, kind)
    return kind is nn.SiLU or (kind.__name__, kind.__module__) == ("SiLUActivation", "transformers.activations")


def _has_hooks(module: nn.Module) -> bool:
    own = vars(module)
    # A list, because a generator takes longer.
    hooked = any([own[name] for name in HOOKS]) or not calls_own_forward(module)
    return hooked or torch.nn.modules.module._has_any_global_hook()


class Scaled(nn.Module):
    """Stands in for a module of a probe: multiplies by a number, or rows by numbers."""

    def __init__(self, factor: float | torch.Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the multiple."""
        return x * self.factor
