"""``RMSNorm`` and ``LayerNorm``: PyTorch's modules on ``rms_norm`` and ``layer_norm``."""

from __future__ import annotations

import torch
from torch import nn

from rl_kernels.norm.api import layer_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dim, in which a row depends on that row and the weight alone, bit for bit.

    Constructor, parameters and ``state_dict`` are those of ``nn.RMSNorm``. ``forward`` is ``rms_norm``, which documents
    shapes, dtypes, gradients, ``main_grad`` and errors.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        cast_first: bool = False,
    ) -> None:
        """Make the module of ``nn.RMSNorm``.

        Args:
            normalized_shape: D, the last dim.
            eps: as in ``rms_norm``; None is the machine epsilon of FP32, as in ``nn.RMSNorm`` for 16-bit inputs, which
                it computes in FP32.
            elementwise_affine: have a weight.
            device: of the weight.
            dtype: of the weight.
            offset: as in ``rms_norm``.
            cast_first: as in ``rms_norm``; False rounds once, as ``nn.RMSNorm`` does.

        Raises:
            TypeError: ``normalized_shape`` is not one integer.
        """
        super().__init__(_last_dim(normalized_shape), eps, elementwise_affine, device, dtype)
        self.offset, self.cast_first = offset, cast_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of each row of ``x[..., D]``."""
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps=eps, offset=self.offset, cast_first=self.cast_first)

    def extra_repr(self) -> str:
        """Return the arguments that ``repr`` shows: the arguments of ``nn.RMSNorm``, offset and cast_first."""
        return f"{super().extra_repr()}, offset={self.offset}, cast_first={self.cast_first}"


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim, in which a row depends on that row and the parameters alone, bit for bit.

    Constructor, parameters and ``state_dict`` are those of ``nn.LayerNorm``. ``forward`` is ``layer_norm``, which
    documents shapes, dtypes, gradients, ``main_grad`` and errors.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the module of ``nn.LayerNorm``; ``normalized_shape`` is D, the last dim.

        Raises:
            TypeError: ``normalized_shape`` is not one integer.
        """
        super().__init__(_last_dim(normalized_shape), eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the norm of each row of ``input[..., D]``."""
        return layer_norm(input, self.weight, self.bias, eps=self.eps)


def _last_dim(normalized_shape: object) -> int:
    if isinstance(normalized_shape, (list, tuple)) and len(normalized_shape) == 1:
        (normalized_shape,) = normalized_shape
    if isinstance(normalized_shape, bool) or not isinstance(normalized_shape, int):
        raise TypeError(f"normalized_shape: expected an integer, the last dim, got {normalized_shape!r}")
    return normalized_shape
