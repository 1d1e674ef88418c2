"""What versions of vLLM name differently: the cache, a function of the second runner, and where an option is.

A layer's cache is ``[pages, 2, page, Hkv, D]``, keys before values. vLLM 0.24 and 0.26 ask a backend for that shape.
vLLM 0.32 lays the cache out itself, as ``[pages, slots, page, C]``: a backend says how many slots there are, what C is
and in which order the dims are in memory. Two slots with all heads in C are the same memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.worker.gpu.sample import prompt_logprob, sampler

SECOND_RUNNER = sampler, prompt_logprob
"""The modules of the second runner that compute log-probs: of sampled tokens, and of prompts."""
TOP_TOKENS = next(name for name in ("compute_topk_scores", "compute_topk_logprobs") if hasattr(sampler, name))
"""Their function that does so; vLLM 0.24 has the second name."""
PAGES_OF = 16
"""The number of keys of a page is a multiple of this."""


class PagedBackend(AttentionBackend):
    """A backend with this cache, for each version of vLLM."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the sizes of a page."""
        return [MultipleOf(PAGES_OF)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache, for vLLM 0.24 and 0.26."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's spec with a slot for keys and one for values, for vLLM 0.32."""
        content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return replace(spec, num_head_slots=2, state_content_bytes=content)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the orders of dims in memory, for vLLM 0.32: each layer's pages are contiguous."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


def pages(cache: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a view ``[pages, 2, page, Hkv, D]`` of the cache of any of these versions."""
    return cache.view(*cache.shape[:3], heads, -1)


def returns_routes(config: Any) -> bool:
    """Say whether an engine returns the experts that it chose; vLLM 0.32 has the option in a part of its own."""
    place = getattr(config, "aux_output_config", config.model_config)
    return bool(place.enable_return_routed_experts)
