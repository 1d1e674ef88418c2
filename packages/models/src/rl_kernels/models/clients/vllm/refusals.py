"""Refuse options that the plugin does not cover: of an engine before weights are loaded, of a request on arrival."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from vllm.v1.engine.input_processor import InputProcessor

from rl_kernels.models.clients.vllm.requests import DROPPING, MIN_LOGIT, PLAIN, PROCESSED, SAMPLED
from rl_kernels.models.clients.vllm.versions import returns_routes

MIXTURES = ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Mixtures of experts among the covered models."""
COVERED = (
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", *MIXTURES),
)
"""Models whose layers all run on our operators; other models have their own norms, activations or attention."""

ROPE_TYPES = ("default", "linear", "llama3")


def refuse(name: str, value: object, only: object = None) -> None:
    """Raise ``ValueError`` if an option is not the only value that is covered."""
    if value != only:
        raise ValueError(f"{name}: expected {only!r} with RL_KERNELS_VLLM=1, got {value!r}")


def rope_parameters(text: Any) -> list[dict[str, Any]]:
    """Return the parameters of each rotary embedding of a config; Gemma 3 has one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [each for each in parameters.values() if each] if "full_attention" in parameters else [parameters]


def check(config: Any) -> None:
    """Refuse a ``VllmConfig`` under which other code than our operators would compute rows.

    Raises:
        ValueError: the message names the option.
    """
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    backend = config.attention_config.backend
    unknown = [name for name in model.architectures if name not in COVERED]
    if unknown:
        raise ValueError(f"architectures: expected {' or '.join(COVERED)} with RL_KERNELS_VLLM=1, got {unknown[0]}")
    refuse("attention_backend", getattr(backend, "name", backend), "CUSTOM")
    refuse("quantization", model.quantization)
    refuse("head_dtype", model.head_dtype, model.dtype)
    refuse("enable_lora", config.lora_config)
    refuse("speculative_config", config.speculative_config)
    # vLLM 0.26 has no watermarks.
    refuse("watermark_config", getattr(config, "watermark_config", None))
    refuse("tensor_parallel_size", parallel.tensor_parallel_size, 1)
    refuse("pipeline_parallel_size", parallel.pipeline_parallel_size, 1)
    if model.logprobs_mode not in ("raw_logprobs", PROCESSED):
        refuse("logprobs_mode", model.logprobs_mode, "raw_logprobs")
    if model.model_impl not in ("auto", "vllm"):
        refuse("model_impl", model.model_impl, "auto")
    if model.logprobs_mode == PROCESSED:
        installed = [entry.value for entry in entry_points(group="vllm.logits_processors")]
        refuse("logits_processors", [*(model.logits_processors or ()), *installed] or None)
    if model.architectures[0] in MIXTURES:
        check_mixture(config)
    else:
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            refuse(name, getattr(text, name, None) or None)
    refuse("use_bidirectional_attention", getattr(text, "use_bidirectional_attention", None) or None)
    for parameters in rope_parameters(text):
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type: expected {' or '.join(ROPE_TYPES)} with RL_KERNELS_VLLM=1, got {kind!r}")


def check_mixture(config: Any) -> None:
    """Refuse a ``VllmConfig`` under which experts are elsewhere, or that vLLM and transformers compute differently.

    Raises:
        ValueError: the message names the option.
    """
    text, parallel = config.model_config.hf_text_config, config.parallel_config
    architecture = config.model_config.architectures[0]
    refuse("enable_expert_parallel", parallel.enable_expert_parallel, False)
    refuse("enable_eplb", parallel.enable_eplb, False)
    # Without expert parallelism these ranks would share each expert.
    refuse("data_parallel_size", parallel.data_parallel_size, 1)
    refuse("enable_return_routed_experts", returns_routes(config), False)
    refuse("moe_backend", config.kernel_config.moe_backend, "auto")
    refuse("hidden_act", text.hidden_act, "silu")
    if architecture == "Qwen2MoeForCausalLM":
        # vLLM's has biases always.
        refuse("qkv_bias", getattr(text, "qkv_bias", True), True)
    else:
        refuse("shared_expert_intermediate_size", getattr(text, "shared_expert_intermediate_size", None) or None)
    # vLLM's models of these families have neither; OLMoE's has one epsilon.
    for name in ("sliding_window", "clip_qkv", "attention_bias"):
        refuse(name, getattr(text, name, None) or None)
    if architecture == "OlmoeForCausalLM":
        refuse("rms_norm_eps", text.rms_norm_eps, 1e-5)


def check_layers(config: Any) -> None:
    """Refuse layers that a platform of vLLM has given another attention than the selected one.

    Raises:
        ValueError: the message names the layer's backend.
    """
    for layer in config.compilation_config.static_forward_context.values():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            refuse("attention_backend", backend.get_name(), "CUSTOM")


def check_request(mode: str, params: Any, softcap: float | None = None) -> None:
    """Refuse a ``SamplingParams`` whose processed log-probs do not follow from the model's logits.

    Args:
        mode: the engine's mode of log-probs.
        params: what is asked for.
        softcap: the soft cap of the model's logits.

    Raises:
        ValueError: the message names the option.
    """
    if (getattr(params, "extra_args", None) or {}).get(MIN_LOGIT):
        refuse(f"logprobs_mode for {MIN_LOGIT}", mode, PROCESSED)
        refuse(f"flat_logprobs for {MIN_LOGIT}", getattr(params, "flat_logprobs", False), False)
    # Pooling requests have neither attribute.
    wants_logprobs = getattr(params, "logprobs", None) is not None or getattr(params, "logprob_token_ids", None)
    if mode != PROCESSED or not wants_logprobs:
        return
    for name, values in PLAIN.items():
        # vLLM's code for the cap rounds in another way than linear_logp, which computes the log-probs.
        if name in SAMPLED and not (softcap and name in DROPPING):
            continue
        value = getattr(params, name)
        if value not in values:
            of = " of a model with a soft cap" if name in DROPPING else ""
            raise ValueError(
                f"{name}: expected {values[0]!r} with RL_KERNELS_VLLM=1 and logprobs_mode={PROCESSED!r}{of}, got "
                f"{value!r}"
            )


_original_validate_params: Any = InputProcessor._validate_params


def _validate_params(self: Any, params: Any, *args: Any, **options: Any) -> Any:
    text = self.model_config.hf_text_config
    check_request(self.model_config.logprobs_mode, params, getattr(text, "final_logit_softcapping", None))
    return _original_validate_params(self, params, *args, **options)


def install() -> None:
    """Check requests where vLLM does."""
    InputProcessor._validate_params = _validate_params
