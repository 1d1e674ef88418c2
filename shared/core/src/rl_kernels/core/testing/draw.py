"""Random inputs that are the same on every device and in every dtype: drawn on the CPU in FP64, then rounded."""

from __future__ import annotations

import torch


class Draw:
    """A seeded source of random tensors in one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal values with standard deviation ``scale``."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale
        return values.to(self.device, dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return values uniform in ``[low, high)``."""
        values = torch.rand(shape, generator=self._generator, dtype=torch.float64) * (high - low) + low
        return values.to(self.device, dtype or self.dtype)

    def ids(self, size: int, *shape: int) -> torch.Tensor:
        """Return int64 ids uniform in ``[0, size)``; the last one is always ``size - 1``."""
        ids = torch.randint(size, shape, generator=self._generator)
        ids.view(-1)[-1:] = size - 1
        return ids.to(self.device)

    def mask(self, density: float, *shape: int) -> torch.Tensor:
        """Return a boolean mask, each element True with probability ``density``."""
        return (torch.rand(shape, generator=self._generator, dtype=torch.float64) < density).to(self.device)

    def permutation(self, size: int) -> torch.Tensor:
        """Return a random order of ``size`` indices, on the CPU."""
        return torch.randperm(size, generator=self._generator)

    def integer(self, low: int, high: int) -> int:
        """Return an integer uniform in ``[low, high)``."""
        return int(torch.randint(low, high, (), generator=self._generator))
