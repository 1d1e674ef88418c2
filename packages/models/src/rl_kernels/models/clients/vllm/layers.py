"""vLLM's norms, linear layers, rotary embedding and gates on the functions that ``invariant(model)`` uses."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rl_kernels.det_gemm import det_linear
from rl_kernels.models.clients.vllm.ops import gelu_tanh_mul, rotary, silu_mul
from rl_kernels.models.clients.vllm.refusals import refuse, rope_parameters
from rl_kernels.norm import rms_norm


class Norm(RMSNorm):
    """``rms_norm``, with the residual if vLLM passes one."""

    def _normed(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        refuse("var_hidden_size", self.variance_size_override)
        weight = self.weight if self.has_weight else None
        return rms_norm(x, weight, eps=self.variance_epsilon, residual=residual, cast_first=True)

    forward_native = forward_cuda = forward_cpu = forward_oot = _normed


class GemmaNorm(GemmaRMSNorm):
    """``rms_norm`` with ``1 + weight``, rounded once at its end."""

    def _normed(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return rms_norm(x, self.weight, eps=self.variance_epsilon, residual=residual, offset=1.0, cast_first=False)

    forward_native = forward_cuda = forward_cpu = forward_oot = _normed


class Gate(SiluAndMul):
    """``silu(gate) * up`` of the two halves of a row."""

    def __init__(self, *, compile_native: bool = True) -> None:
        """Make the layer without vLLM's kernel."""
        super(SiluAndMul, self).__init__(compile_native=False)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return silu_mul(x)

    forward_native = forward_cuda = forward_cpu = forward_oot = _gated


class GeluGate(GeluAndMul):
    """``gelu(gate) * up`` of the two halves of a row, GELU in its tanh form."""

    def __init__(self, approximate: str = "none") -> None:
        """Make the layer without vLLM's kernel.

        Raises:
            ValueError: GELU in another form.
        """
        super(GeluAndMul, self).__init__()
        refuse("approximate", approximate, "tanh")
        self.approximate = approximate

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_tanh_mul(x)

    forward_native = forward_cuda = forward_cpu = forward_oot = _gated


class _Rotary:
    """A mixin that rotates by the angles of transformers' own module, in the dtype in which that does."""

    rope_type: ClassVar[str]
    head_size: int
    base: float
    rotary_dim: int
    is_neox_style: bool
    max_position_embeddings: int
    register_buffer: Any
    angles_cos: torch.Tensor
    angles_sin: torch.Tensor

    def _prepare(self) -> None:
        """Make the tables of cos and sin ``[positions, D]`` as transformers does: frequencies on the CPU."""
        refuse("rotary_dim", self.rotary_dim, self.head_size)
        refuse("is_neox_style", self.is_neox_style, True)
        config = get_current_vllm_config()
        model, device = config.model_config, config.device_config.device
        text = copy.copy(model.hf_text_config)
        text.rope_parameters = next(
            parameters
            for parameters in rope_parameters(text)
            if (parameters.get("rope_type", "default"), parameters["rope_theta"]) == (self.rope_type, self.base)
        )
        with torch.device("cpu"):
            rotary_embedding = LlamaRotaryEmbedding(text)
        # vLLM shares one module among all models of a process with equal rotary embeddings, whatever their lengths.
        places = torch.arange(max(self.max_position_embeddings, model.max_model_len), device=device)[None]
        cos, sin = rotary_embedding.to(device)(torch.empty(0, dtype=model.dtype, device=device), places)
        # Buffers, because vLLM restores those after its sleep mode.
        self.register_buffer("angles_cos", cos[0].contiguous(), persistent=False)
        self.register_buffer("angles_sin", sin[0].contiguous(), persistent=False)

    def _rotated(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if key is None:
            raise ValueError("key: expected one beside query with RL_KERNELS_VLLM=1")
        return rotary(positions, query, key, self.angles_cos, self.angles_sin)


class Rotary(_Rotary, RotaryEmbedding):
    """Rotary embedding without scaled frequencies."""

    rope_type = "default"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make the layer and its tables."""
        super().__init__(*args, **options)
        self._prepare()

    forward_native = forward_cuda = forward_cpu = forward_oot = _Rotary._rotated


class LinearRotary(_Rotary, LinearScalingRotaryEmbedding):
    """Rotary embedding with frequencies divided by a factor."""

    rope_type = "linear"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make the layer and its tables."""
        super().__init__(*args, **options)
        self._prepare()

    forward_native = forward_cuda = forward_cpu = forward_oot = _Rotary._rotated


class Llama3Rotary(_Rotary, Llama3RotaryEmbedding):
    """Rotary embedding with Llama 3's frequencies."""

    rope_type = "llama3"

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make the layer and its tables."""
        super().__init__(*args, **options)
        self._prepare()

    forward_native = forward_cuda = forward_cpu = forward_oot = _Rotary._rotated


def _apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return det_linear(x, layer.weight, bias)


def _keep_weight(self: Any, layer: Any) -> None:
    """Leave the weight as it was loaded."""


REPLACED: dict[Any, type] = {
    **{RMSNorm: Norm, GemmaRMSNorm: GemmaNorm, SiluAndMul: Gate, GeluAndMul: GeluGate, RotaryEmbedding: Rotary},
    **{LinearScalingRotaryEmbedding: LinearRotary, Llama3RotaryEmbedding: Llama3Rotary},
}


def install() -> None:
    """Replace the layers that vLLM makes from now on."""
    for original, ours in REPLACED.items():
        original.register_oot(ours, name=original.__name__)
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.apply, method.process_weights_after_loading = _apply, _keep_weight
