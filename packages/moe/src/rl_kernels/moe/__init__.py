"""The experts of a mixture, whose tokens do not depend on the batch."""

from rl_kernels.moe.api import experts

__all__ = ["experts"]
