"""The functions of the installed vLLM that the plugin replaces, or that vLLM calls: ours take the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
Pairs = dict[str, tuple[Callable[..., Any], Callable[..., Any]]]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def of_layers() -> Pairs:
    """Return the functions of layers: vLLM's, and ours."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from rl_kernels.models.clients.vllm import layers, logprobs, mixtures

    found: Pairs = {"LogitsProcessor": (LogitsProcessor.forward, logprobs.Logits.forward)}
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        found[f"{method.__name__}.apply"] = method.apply, layers._apply
        found[f"{method.__name__} after loading"] = method.process_weights_after_loading, layers._keep_weight
    for name in ("__init__", "maybe_roundup_sizes", "process_weights_after_loading"):
        found[f"experts {name}"] = getattr(UnquantizedFusedMoEMethod, name), getattr(mixtures.KeptExperts, name)
    for family in mixtures.FAMILIES:
        found[family.block.__name__] = family.block.forward, mixtures._forward
    for original, ours in layers.REPLACED.items():
        found[original.__name__] = original.forward_native, ours.forward_oot
        found[f"{original.__name__}()"] = original.__init__, ours.__init__
    return found


def of_attention() -> Pairs:
    """Return the functions of an attention backend: vLLM's, and ours."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

    from rl_kernels.models.clients.vllm.attention import Backend, Builder, Implementation

    found: Pairs = {
        "forward": (AttentionImpl.forward, Implementation.forward),
        "build": (AttentionMetadataBuilder.build, Builder.build),
        "builder": (AttentionMetadataBuilder.__init__, Builder.__init__),
    }
    # vLLM 0.26 asks for the cache's shape, vLLM 0.32 has the other two.
    names = {"get_kv_cache_shape"}, {"customize_spec", "supported_kv_cache_layouts"}
    asked = [each for each in names if each <= vars(AttentionBackend).keys()]
    assert len(asked) == 1
    for name in (*asked[0], "get_supported_kernel_block_sizes", "supports_batch_invariance"):
        found[name] = getattr(AttentionBackend, name), getattr(Backend, name)
    return found


def of_engines() -> Pairs:
    """Return the functions of engines and samplers: vLLM's, and ours."""
    from rl_kernels.models.clients.vllm import attention, logprobs, outputs, refusals

    named = {"gathered": logprobs._gathered, "named_tokens": logprobs._named_tokens, "top_tokens": logprobs._top_tokens}
    named |= {"sample": logprobs._sample, "temperature": logprobs._temperature}
    return {
        "from_new_request": (outputs._original_from_new_request, outputs._from_new_request.__func__),
        "update_sample_logprobs": (outputs._original_update, outputs._update_sample_logprobs),
        "create_engine_config": (attention._original_create_engine_config, attention._create_engine_config),
        "get_attn_backend_cls": (
            attention._original_get_attn_backend_cls,
            attention._get_attn_backend_cls.__func__,
        ),
        "validate_params": (refusals._original_validate_params, refusals._validate_params),
        "Sampler": (logprobs._sampler_init, logprobs._sampler),
        **{name: (logprobs._originals[name], ours) for name, ours in named.items()},
    }


def arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function without its object."""
    return [each for each in inspect.signature(function).parameters.values() if each.name != "self"]


@pytest.mark.parametrize("pairs", [of_layers, of_attention, of_engines])
def test_ours_take_the_arguments_of_vllms(pairs: Callable[[], Pairs]) -> None:
    found = pairs()
    assert len(found) > 5
    for name, (theirs, ours) in found.items():
        expected = [each.name for each in arguments(theirs) if each.kind not in VARIADIC]
        own = [each for each in arguments(ours) if each.kind not in VARIADIC]
        takes_others = len(own) < len(arguments(ours))
        common = len(expected) if not takes_others else min(len(own), len(expected))
        assert [each.name for each in own[:common]] == expected[:common], name
        # Those of another version of vLLM.
        assert all(each.default is not inspect.Parameter.empty for each in own[common:]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_backend_is_valid_for_layers_with_a_window(dtype: torch.dtype) -> None:
    from vllm.platforms.interface import DeviceCapability

    from rl_kernels.models.clients.vllm.attention import Backend

    known = {"head_size": 128, "dtype": dtype, "kv_cache_dtype": "auto", "block_size": 32, "attn_type": "decoder"}
    known |= {"device_capability": DeviceCapability(9, 0), "has_sliding_window": True, "use_batch_invariant": True}
    asked = inspect.signature(Backend.validate_configuration).parameters
    # What a GPU's platform asks of a selected backend; other properties are of other models.
    assert Backend.validate_configuration(**{name: known.get(name, False) for name in asked}) == []


def test_a_cache_of_vllm_is_seen_as_pages() -> None:
    from rl_kernels.models.clients.vllm.versions import PagedBackend, pages

    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
    shape = PagedBackend.get_kv_cache_shape(3, 32, 2, 8)
    raw = torch.arange(torch.Size(shape).numel() * 2).to(torch.int8)
    if hasattr(interface, "create_kv_cache_views"):
        spec = PagedBackend.customize_spec(interface.FullAttentionSpec(**sizes))
        (layout,) = PagedBackend.supported_kv_cache_layouts()
        place = {"size": raw.numel(), "layers": ["only"], "offset": 0, "layer_stride": raw.numel()}
        tensor = interface.KVCacheTensor(**place, block_stride=spec.page_size_bytes)
        (cache,) = interface.create_kv_cache_views(raw, spec, 3, layout, tensor)
    else:
        cache = raw.view(torch.float16).view(shape)
    seen = pages(cache, 2)
    assert seen.is_contiguous()
    assert seen.shape == shape
    assert torch.equal(seen.flatten().view(torch.int8), raw)


def test_the_configuration_of_an_engine_says_that_the_plugin_is_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import fields

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from rl_kernels.models.clients.vllm import attention
    from rl_kernels.models.clients.vllm.requests import MARK

    assert "additional_config" in {field.name for field in fields(VllmConfig)}
    # A configuration of vLLM's own needs a device.
    monkeypatch.setattr(attention, "_original_create_engine_config", lambda args: args.additional_config)
    monkeypatch.setattr(attention, "check", lambda config: None)
    theirs = {"mine": 3}
    # A name would be looked up in a cache of models.
    asked = EngineArgs(model=str(tmp_path), additional_config=theirs)
    assert attention._create_engine_config(asked) == {"mine": 3, MARK: True}
    assert theirs == {"mine": 3}
