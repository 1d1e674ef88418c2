"""Refuse settings of verl under which rollouts of vLLM have other log-probs than training, before models are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from rl_kernels.models.clients.vllm import VARIABLE
from rl_kernels.models.clients.vllm.requests import PLAIN, PROCESSED

Refusal = tuple[str, object, str]
"""The name of a setting, its value, and what to do."""
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ONE_RANK = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
SAMPLING = ("temperature", "top_p", "top_k")


def is_wanted(config: Any) -> bool:
    """Say whether a run of verl asks for the plugin: in this process, or by the environment of its workers."""
    workers = _select(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}")
    return "1" in (os.environ.get(VARIABLE), str(workers))


def check(config: Any) -> None:
    """Refuse settings with which the log-probs of rollout and training differ, if the run asks for the plugin.

    Args:
        config: verl's configuration, as ``main_ppo`` composes it.

    Raises:
        ValueError: the message names the setting, and says what to do.
    """
    if not is_wanted(config):
        return
    for name, value, remedy in _refusals(config):
        raise ValueError(f"{name}: got {value!r} with {VARIABLE}=1; {remedy}")


def checked(validate: Callable[..., None]) -> Callable[..., None]:
    """Return verl's ``validate_config``, which calls ``check`` first."""

    def validate_config(config: Any, *args: Any, **options: Any) -> None:
        check(config)
        validate(config, *args, **options)

    validate_config.replaced = validate  # type: ignore[attr-defined]
    return validate_config


def _refusals(config: Any) -> Iterator[Refusal]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    actor = config.actor_rollout_ref.actor
    if rollout.name != "vllm":
        yield f"{ROLLOUT}.name", rollout.name, "set it to vllm, or leave the variable unset"
    for name in ONE_RANK:
        if rollout.get(name, 1) != 1:
            yield f"{ROLLOUT}.{name}", rollout[name], "set it to 1: more GPUs then run more engines"
    for name in SAMPLING:
        # verl's actor divides logits by the temperature, 0 too.
        allowed = (1.0,) if name == "temperature" else PLAIN[name]
        if rollout[name] not in allowed:
            yield f"{ROLLOUT}.{name}", rollout[name], f"set it to {allowed[0]}: log-probs are the model's own"
    yield from _of_validation(rollout)
    for name, value in (("lora_rank", model.get("lora_rank", 0)), ("lora.rank", model.get("lora", {}).get("rank", 0))):
        if value:
            yield f"{MODEL}.{name}", value, "set it to 0: training adds an adapter in another order than the rollout"
    if rollout.get("quantization"):
        yield f"{ROLLOUT}.quantization", rollout.quantization, "leave it unset"
    if actor.strategy not in ("fsdp", "fsdp2"):
        yield "actor_rollout_ref.actor.strategy", actor.strategy, "set it to fsdp2"
        return
    if actor.fsdp_config.ulysses_sequence_parallel_size != 1:
        name = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
        yield name, actor.fsdp_config.ulysses_sequence_parallel_size, "set it to 1"
    if not model.use_fused_kernels or model.fused_kernel_options.impl_backend != "torch":
        yield f"{MODEL}.use_fused_kernels", model.use_fused_kernels, "set it to True, with impl_backend=torch"


def _of_validation(rollout: Any) -> Iterator[Refusal]:
    """Validation asks for log-probs too; those of the processed mode are refused by the engine at its first request."""
    if rollout.logprobs_mode not in (PROCESSED, "raw_logprobs"):
        yield f"{ROLLOUT}.logprobs_mode", rollout.logprobs_mode, "set it to raw_logprobs"
    if rollout.logprobs_mode != PROCESSED or not rollout.calculate_log_probs:
        return
    for name in SAMPLING:
        value = rollout.val_kwargs[name]
        if value not in PLAIN[name]:
            yield f"{ROLLOUT}.val_kwargs.{name}", value, f"set {ROLLOUT}.logprobs_mode=raw_logprobs"


def _select(config: Any, path: str) -> Any:
    """Return a value of a configuration, or None if a part of its path is missing."""
    for name in path.split("."):
        config = (config or {}).get(name)
    return config
