"""``DetLinear``: ``nn.Linear`` on ``det_linear``."""

from __future__ import annotations

import torch
from torch import nn

from rl_kernels.core import chains
from rl_kernels.det_gemm import segments
from rl_kernels.det_gemm.api import det_linear


class DetLinear(nn.Linear):
    """``nn.Linear`` in which an output row depends on its input row and the parameters alone, bit for bit.

    Constructor, parameters, initialization and ``state_dict`` are those of ``nn.Linear``. ``forward`` is
    ``det_linear(input, weight, bias)``, which documents shapes, dtypes, gradients, ``main_grad``, segments and errors.
    """

    k_segments: int = 1
    dx_segments: int = 1
    join_tokens: int | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        k_segments: int = 1,
        dx_segments: int = 1,
        join_tokens: int | None = None,
    ) -> None:
        """Make the layer of ``nn.Linear``; the options that cut its sums are those of ``det_linear``.

        Raises:
            TypeError, ValueError: an option is not as in ``det_linear``.
        """
        segments.validate(k_segments=k_segments, dx_segments=dx_segments)
        chains.validate(join_tokens)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.k_segments, self.dx_segments, self.join_tokens = k_segments, dx_segments, join_tokens

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input[..., in_features] @ weight^T + bias``, ``[..., out_features]``."""
        return det_linear(
            input,
            self.weight,
            self.bias,
            k_segments=self.k_segments,
            dx_segments=self.dx_segments,
            join_tokens=self.join_tokens,
        )

    def extra_repr(self) -> str:
        """Return the arguments to print: those of ``nn.Linear``, and options that cut sums, if they do."""
        options = {name: getattr(self, name) for name in ("k_segments", "dx_segments", "join_tokens")}
        return ", ".join((super().extra_repr(), *(f"{name}={x}" for name, x in options.items() if x not in (1, None))))

    @classmethod
    def from_linear(
        cls, module: nn.Linear, *, k_segments: int = 1, dx_segments: int = 1, join_tokens: int | None = None
    ) -> DetLinear:
        """Return a layer that shares the parameters of ``module``: the same ``nn.Parameter`` objects, not copies.

        Dtype, device, ``requires_grad``, ``main_grad`` and hooks of the parameters are kept, and so is the training
        flag. Hooks registered on ``module`` itself are not.

        Raises:
            TypeError: ``module`` is not an ``nn.Linear``, or a parametrization computes its weight.
            TypeError, ValueError: an option is not as in ``det_linear``.
        """
        if not isinstance(module, nn.Linear):
            raise TypeError(f"module: expected an nn.Linear, got {type(module).__name__}")
        if not isinstance(module.weight, nn.Parameter):
            raise TypeError("module: expected a weight that is a parameter, got one computed by a parametrization")
        layer = cls(
            module.in_features,
            module.out_features,
            device="meta",
            k_segments=k_segments,
            dx_segments=dx_segments,
            join_tokens=join_tokens,
        )
        layer.weight, layer.bias = module.weight, module.bias
        return layer.train(module.training)
