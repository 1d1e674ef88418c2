"""Benchmarks: verify a result by the checker's rules, then time it beside plain PyTorch in the same run."""

from rl_kernels.core.bench.runner import main

__all__ = ["main"]
