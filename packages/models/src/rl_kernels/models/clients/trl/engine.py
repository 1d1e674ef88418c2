"""Check that the vLLM engine of a trainer returns log-probs with the bits of training."""

from __future__ import annotations

from typing import Any

from rl_kernels.models.clients.vllm import VARIABLE
from rl_kernels.models.clients.vllm.requests import MARK, PLAIN
from rl_kernels.models.merged_adapters import check_adapters

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options of sampling that a trainer has as attributes."""


def check_engine(trainer: Any, dtype: Any) -> None:
    """Refuse an engine, in this process or a server's, or requests, whose log-probs differ from training.

    Args:
        trainer: GRPOTrainer with ``use_vllm``.
        dtype: dtype in which the model computes.

    Raises:
        ValueError: the message names the setting and the remedy.
    """
    settings = {name: getattr(trainer, name) for name in SAMPLED} | (trainer.args.generation_kwargs or {})
    settings["structured_outputs"] = trainer.args.vllm_structured_outputs_regex
    for name, value in settings.items():
        allowed = PLAIN.get(name, (value,))
        if value is not None and value not in allowed:
            raise ValueError(f"{name}: expected {allowed[0]!r} with invariant and use_vllm, got {value!r}")
    if trainer.args.cast_lm_head_to_fp32:
        raise ValueError("cast_lm_head_to_fp32: expected False with invariant and use_vllm: vLLM's head is not cast")
    if hasattr(trainer.model, "peft_config"):
        _check_adapters(trainer)
    generation: Any = getattr(trainer, "vllm_generation", None)
    engine = getattr(generation, "llm", None)
    if engine is not None:
        config, place = engine.llm_engine.vllm_config, "before the trainer is made"
        engine_dtype, own = config.model_config.dtype, config.additional_config
    elif getattr(generation, "vllm_client", None) is not None:
        info, place = generation.vllm_client.get_server_info(), "where the server starts"
        engine_dtype, own = info["model_config"]["dtype"], info["additional_config"]
    else:
        return
    if MARK not in own:
        raise ValueError(f"{VARIABLE}: expected 1 {place}, vLLM runs without the plugin")
    _check_dtype(trainer, *(str(each).removeprefix("torch.") for each in (engine_dtype, dtype)))


def _check_adapters(trainer: Any) -> None:
    """Refuse adapters whose merged weights, which TRL sends to vLLM, training cannot compute with."""
    for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        if getattr(trainer, name, False):
            raise ValueError(f"peft_config: expected none with invariant, use_vllm and {name}, which shards weights")
    check_adapters(trainer.model)


def _check_dtype(trainer: Any, engine: str, model: str) -> None:
    """Refuse a model that computes in another dtype than the engine."""
    if engine != model:
        remedy = f'set model_init_kwargs={{"dtype": "{engine}"}} in GRPOConfig'
        if model == "float32":
            keep = f"call use_in(..., compute_dtype=torch.{engine}), which keeps FP32 weights for the optimizer"
            remedy = f"{keep}, or {remedy}"
        raise ValueError(f"dtype: expected {engine} as in vLLM's engine, the trainer's model has {model}; {remedy}")
    precision = trainer.accelerator.mixed_precision
    autocast = {"no": model, "bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
    if autocast != model:
        raise ValueError(
            f"bf16, fp16: expected passes in {model} as in vLLM's engine, the trainer's autocast is {autocast}; "
            "set both to False in GRPOConfig"
        )
