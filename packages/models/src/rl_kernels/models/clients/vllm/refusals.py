"""What the plugin does not cover is refused by name, before weights are loaded."""

from __future__ import annotations

from typing import Any

COVERED = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Models all of whose layers run on our operators; others have norms, activations or attention of their own."""


def refuse(name: str, value: object, only: object = None) -> None:
    """Raise ``ValueError`` if an option is not the only value that is covered."""
    if value != only:
        raise ValueError(f"{name}: expected {only!r} with RL_KERNELS_VLLM=1, got {value!r}")


def check(config: Any) -> None:
    """Refuse a ``VllmConfig`` that would take rows elsewhere than to our operators.

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
    refuse("enable_lora", config.lora_config)
    refuse("speculative_config", config.speculative_config)
    refuse("tensor_parallel_size", parallel.tensor_parallel_size, 1)
    refuse("pipeline_parallel_size", parallel.pipeline_parallel_size, 1)
    refuse("logprobs_mode", model.logprobs_mode, "raw_logprobs")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        refuse(name, getattr(text, name, None) or None)
    kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type: expected default or llama3 with RL_KERNELS_VLLM=1, got {kind!r}")
