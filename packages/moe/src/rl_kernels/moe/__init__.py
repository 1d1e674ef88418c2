"""Mixtures of experts whose tokens do not depend on the batch: the choice of experts, and the experts."""

from rl_kernels.moe.api import Routes, experts, route

__all__ = ["Routes", "experts", "route"]
