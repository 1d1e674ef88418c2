"""Check that the vLLM engine of a trainer returns log-probs with the bits of training."""

from __future__ import annotations

from typing import Any

from rl_kernels.models.clients.trl.kept import KeptLogp
from rl_kernels.models.clients.vllm import VARIABLE
from rl_kernels.models.clients.vllm.requests import DROPPING, MARK, MIN_LOGIT, MIN_LOGIT_ID, PLAIN, PROCESSED, SAMPLED
from rl_kernels.models.merged_adapters import check_adapters


def settings_of(trainer: Any) -> dict[str, Any]:
    """Return the options of a trainer's requests to vLLM that are set."""
    names = (*SAMPLED, "repetition_penalty")
    settings = {name: getattr(trainer, name) for name in names} | (trainer.args.generation_kwargs or {})
    if trainer.args.vllm_structured_outputs_regex is not None:
        settings["structured_outputs"] = trainer.args.vllm_structured_outputs_regex
    return {name: value for name, value in settings.items() if value is not None}


def drops_tokens(trainer: Any) -> bool:
    """Say whether a trainer's requests to vLLM drop tokens."""
    settings = settings_of(trainer)
    return any(settings.get(name, PLAIN[name][0]) not in PLAIN[name] for name in DROPPING)


def check_engine(trainer: Any, dtype: Any, refusal: str | None = None) -> None:
    """Refuse an engine, in this process or a server's, or requests, whose log-probs differ from training.

    Args:
        trainer: GRPOTrainer with ``use_vllm``.
        dtype: dtype in which the model computes.
        refusal: why requests may not drop tokens, or None.

    Raises:
        ValueError: the message names the setting and the remedy.
    """
    # Of several log-probs a token, TRL takes that of the most probable token for the sampled one's.
    only = {**PLAIN, "temperature": (trainer.temperature,), "logprobs": (0,), "logprob_token_ids": (None,)}
    for name, value in settings_of(trainer).items():
        allowed = only.get(name, (value,))
        if name not in DROPPING and value not in allowed:
            raise ValueError(f"{name}: expected {allowed[0]!r} with invariant and use_vllm, got {value!r}")
    if drops_tokens(trainer):
        if trainer.vllm_mode != "colocate":
            raise ValueError(
                "vllm_mode: expected 'colocate' with top_k, top_p or min_p and invariant, a server's answer has no "
                f"place for the smallest kept logit, got {trainer.vllm_mode!r}"
            )
        if refusal is not None:
            raise ValueError(refusal)
    if trainer.args.cast_lm_head_to_fp32:
        raise ValueError("cast_lm_head_to_fp32: expected False with invariant and use_vllm: vLLM's head is not cast")
    if hasattr(trainer.model, "peft_config"):
        _check_adapters(trainer)
    generation: Any = getattr(trainer, "vllm_generation", None)
    engine = getattr(generation, "llm", None)
    if engine is not None:
        config, place = engine.llm_engine.vllm_config, "before the trainer is made"
        engine_dtype, own = config.model_config.dtype, config.additional_config
        mode = config.model_config.logprobs_mode
    elif getattr(generation, "vllm_client", None) is not None:
        info, place = generation.vllm_client.get_server_info(), "where the server starts"
        engine_dtype, own = info["model_config"]["dtype"], info["additional_config"]
        mode = info["model_config"]["logprobs_mode"]
    else:
        return
    if MARK not in own:
        raise ValueError(f"{VARIABLE}: expected 1 {place}, vLLM runs without the plugin")
    if mode != PROCESSED and (drops_tokens(trainer) or trainer.temperature != 1):
        raise ValueError(
            f"logprobs_mode: expected {PROCESSED!r} with invariant and temperature {trainer.temperature}, got {mode!r}"
        )
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


def ask_for_min_logit(generation: Any) -> None:
    """Let TRL's generation by vLLM return ``KeptLogp``: its requests ask for the smallest kept logit of each token."""
    given, original = generation.generation_kwargs, generation.generate
    generation.generation_kwargs = {**given, "extra_args": {**(given.get("extra_args") or {}), MIN_LOGIT: True}}

    def generate(*args: Any, **options: Any) -> Any:
        prompts, completions, logps, ids = original(*args, **options)
        rows = [list(map(_kept, *of)) for of in zip(logps, ids, strict=True)]
        return prompts, completions, rows, ids

    generation.generate = generate


def _kept(logps: list[float | None], ids: list[int]) -> list[float | None]:
    """Return the log-probabilities of a token's position, which TRL has sorted by rank."""
    first, last = logps[0], logps[-1]
    if ids[-1] != MIN_LOGIT_ID or first is None or last is None:
        return logps
    return [KeptLogp(first, last), *logps[1:-1]]
