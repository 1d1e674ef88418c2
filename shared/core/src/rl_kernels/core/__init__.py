"""What every rl-kernels operator stands on: registry, dispatch, tolerance contract, checker and fixtures.

The names below are imported when they are first asked for, so that the pytest plugin, which pytest imports wherever
this package is installed, does not bring torch along.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_kernels.core.dispatch import BackendUnavailable, Choice, Verdict, explain, record_dispatch, use_backend
    from rl_kernels.core.operator import Backend, Call, Operator
    from rl_kernels.core.outputs import LogpStats
    from rl_kernels.core.registry import KernelRegistry, UnknownOperator, kernel_registry

__all__ = [
    "Backend",
    "BackendUnavailable",
    "Call",
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
        for module in ("dispatch", "operator", "outputs", "registry"):
            found = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
