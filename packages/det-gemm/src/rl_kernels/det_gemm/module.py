"""``DetLinear``: ``nn.Linear`` on ``det_linear``."""

from __future__ import annotations

import torch
from torch import nn

from rl_kernels.det_gemm.api import det_linear


class DetLinear(nn.Linear):
    """``nn.Linear`` in which an output row depends on its input row and the parameters alone, bit for bit.

    Constructor, parameters, initialisation and ``state_dict`` are those of ``nn.Linear``. ``forward`` is
    ``det_linear(input, weight, bias)``, which documents shapes, dtypes, gradients, ``main_grad`` and errors.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input[..., in_features] @ weight^T + bias``, ``[..., out_features]``."""
        return det_linear(input, self.weight, self.bias)

    @classmethod
    def from_linear(cls, module: nn.Linear) -> DetLinear:
        """Return a layer that shares the parameters of ``module``: the same ``nn.Parameter`` objects, not copies.

        Dtype, device, ``requires_grad``, ``main_grad`` and hooks of the parameters are kept, and so is the training
        flag. Hooks registered on ``module`` itself are not.

        Raises:
            TypeError: ``module`` is not an ``nn.Linear``, or a parametrization computes its weight.
        """
        if not isinstance(module, nn.Linear):
            raise TypeError(f"module: expected an nn.Linear, got {type(module).__name__}")
        if not isinstance(module.weight, nn.Parameter):
            raise TypeError("module: expected a weight that is a parameter, got one computed by a parametrization")
        layer = cls(module.in_features, module.out_features, module.bias is not None, "meta", module.weight.dtype)
        layer.weight, layer.bias = module.weight, module.bias
        return layer.train(module.training)
