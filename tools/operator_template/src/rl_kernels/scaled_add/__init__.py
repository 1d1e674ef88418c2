"""Scaled addition: the operator that a new one starts from."""

from rl_kernels.scaled_add.api import scaled_add

__all__ = ["scaled_add"]
