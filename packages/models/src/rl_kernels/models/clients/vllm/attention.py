"""vLLM's attention backend CUSTOM: ``det_attention`` over the pages of vLLM's cache, prompts, chunks and decode alike.

Tokens of all requests come packed, each request's new ones; its last query stands at its last key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rl_kernels.attention import det_attention
from rl_kernels.models.clients.vllm.refusals import check
from rl_kernels.models.clients.vllm.requests import MARK
from rl_kernels.models.clients.vllm.versions import PagedBackend, pages
from rl_kernels.models.fused.cache import store


@dataclass
class StepMetadata(AttentionMetadata):
    """Locations of a step's tokens and of their keys: tensors that vLLM reuses from step to step, for CUDA graphs."""

    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    longest: int


class Builder(AttentionMetadataBuilder[StepMetadata]):
    """Makes the metadata of a step, without a computation or a sync."""

    # Not ALWAYS: a graph stores the max_seqlen_q of its capture, and vLLM's second runner captures mixed batches with
    # fewer queries than a request may have.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Pass vLLM's arguments to the base class."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        """Return the metadata of one step."""
        common = common_attn_metadata
        return StepMetadata(common.query_start_loc, common.seq_lens, common.block_table_tensor, common.max_query_len)


class Implementation(AttentionImpl[StepMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        """Store the settings of a layer.

        Raises:
            ValueError: a setting is not covered; the message names it.
        """
        refused = {
            "alibi_slopes": alibi_slopes,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == "decoder" else attn_type,
            "kv_cache_dtype": None if kv_cache_dtype == "auto" else kv_cache_dtype,
            **unsupported,
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"{name}: not supported by RL_KERNELS_VLLM=1, got {value!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = logits_soft_cap or 0.0

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write new keys and values to their places in the cache."""
        store(key, value, pages(kv_cache, self.num_kv_heads), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill ``output[T, H, D]``; with zeros while vLLM measures memory, when there is no metadata."""
        if attn_metadata is None:
            return output.fill_(0)
        keys, values = pages(kv_cache, self.num_kv_heads).unbind(1)
        result = det_attention(
            query,
            keys,
            values,
            causal=True,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            cu_seqlens_q=attn_metadata.starts,
            max_seqlen_q=attn_metadata.longest,
            seqused_k=attn_metadata.lengths,
            block_table=attn_metadata.table,
            validate=False,
        )
        return output.copy_(result)


class Backend(PagedBackend):
    """The backend's properties, which vLLM reads before it makes layers."""

    forward_includes_kv_cache_update = False
    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        """Return the class of a layer's attention."""
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the class that makes metadata."""
        return Builder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Say that no row depends on the batch."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Say that layers may have a window; on a GPU, vLLM asks this since 0.26."""
        return True


_original_create_engine_config: Any = EngineArgs.create_engine_config
_original_get_attn_backend_cls: Any = CpuPlatform.get_attn_backend_cls.__func__


@classmethod  # type: ignore[misc]
def _get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **options: Any) -> str:
    """Return the class of a layer's backend; vLLM's own function takes another one on a CPU, whatever is selected."""
    if selected_backend == AttentionBackendEnum.CUSTOM:
        path: str = selected_backend.get_path()
        return path
    path = _original_get_attn_backend_cls(cls, selected_backend, *args, **options)
    return path


def _create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
    if self.attention_backend in (None, "auto") and self.attention_config.backend is None:
        self.attention_backend = AttentionBackendEnum.CUSTOM
    self.additional_config = {**self.additional_config, MARK: True}
    config = _original_create_engine_config(self, *args, **options)
    check(config)
    return config


def install() -> None:
    """Register this backend as vLLM's CUSTOM, the default of engines too; engines refuse options not covered."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")
    EngineArgs.create_engine_config = _create_engine_config
    CpuPlatform.get_attn_backend_cls = _get_attn_backend_cls
