"""What every rl-kernels operator stands on: registry, dispatch, tolerance contract, checker and fixtures."""

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
