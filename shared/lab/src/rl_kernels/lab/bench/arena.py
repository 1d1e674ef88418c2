"""The inputs of one benchmark: random values drawn on the device, in enough copies to exceed the L2 cache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_kernels.core.contract import DTYPES
from rl_kernels.core.testing import Case, Draw, Inputs, Spec
from rl_kernels.lab.bench.definition import bytes_of
from rl_kernels.lab.check.guard import Results

MOST_COPIES = 64
CACHES = 2
"""Total size of the copies of the inputs, as a multiple of the size of the L2 cache."""


class DeviceDraw(Draw):
    """``Draw`` on the device: drawing large inputs on the host would take minutes."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        super().__init__(dtype, device, seed)
        self._there = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal values with standard deviation ``scale``."""
        return self._empty(shape, dtype).normal_(0.0, scale, generator=self._there)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return values uniform in ``[low, high)``."""
        return self._empty(shape, dtype).uniform_(low, high, generator=self._there)

    def ids(self, size: int, *shape: int) -> torch.Tensor:
        """Return int64 ids uniform in ``[0, size)``."""
        return torch.randint(size, shape, generator=self._there, device=self.device)

    def mask(self, density: float, *shape: int) -> torch.Tensor:
        """Return a boolean mask, each element True with probability ``density``."""
        return torch.rand(shape, generator=self._there, device=self.device) < density

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class Arena:
    """One case on one device: the inputs with which every implementation is called."""

    spec: Spec
    case: Case
    dtype: str
    device: torch.device
    seed: int = 123

    @functools.cached_property
    def inputs(self) -> Inputs:
        """The case's keyword arguments."""
        return self.spec.inputs(self.case, DeviceDraw(DTYPES[self.dtype], self.device, self.seed))

    @property
    def leaves(self) -> list[str]:
        """Names of the arguments that get a gradient."""
        return [name for name in self.spec.differentiable if name in self.inputs] if self.case.grad else []

    def upstream(self, outputs: Mapping[str, torch.Tensor]) -> Results:
        """Return a random upstream gradient for each output that carries a gradient."""
        draw = DeviceDraw(torch.float32, self.device, self.seed + 1)
        return {
            name: draw.normal(*value.shape, dtype=value.dtype) for name, value in outputs.items() if value.requires_grad
        }

    @functools.cached_property
    def copies(self) -> list[Inputs]:
        """The inputs in enough copies that a round through them finds nothing in the L2 cache."""
        if self.device.type != "cuda":
            return [self.inputs]
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        count = -(-CACHES * cache // max(bytes_of(self.inputs), 1))
        # deepcopy keeps strides.
        return [self.inputs, *(copy.deepcopy(self.inputs) for _ in range(min(count, MOST_COPIES) - 1))]
