"""Scaled addition: the template of a new operator."""

from rl_kernels.scaled_add.api import scaled_add

__all__ = ["scaled_add"]
