"""Code shared by all rl-kernels operators: registry, dispatch, tolerance contract, kernel helpers, test fixtures.

The names below are imported on first use, because pytest imports this package for its plugin wherever it is installed,
and that must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_kernels.core.canary import CanaryMismatch
    from rl_kernels.core.dispatch import BackendUnavailable, Choice, Verdict, explain, record_dispatch, use_backend
    from rl_kernels.core.operator import Backend, Call, Operator
    from rl_kernels.core.outputs import LogpStats
    from rl_kernels.core.registry import KernelRegistry, UnknownOperator, kernel_registry

__all__ = [
    "Backend",
    "BackendUnavailable",
    "Call",
    "CanaryMismatch",
    "Choice",
    "KernelRegistry",
    "LogpStats",
    "Operator",
    "UnknownOperator",
    "Verdict",
    "explain",
    "kernel_registry",
    "record_dispatch",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("canary", "dispatch", "operator", "outputs", "registry"):
            members = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in members:
                globals()[name] = members[name]
                return members[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
