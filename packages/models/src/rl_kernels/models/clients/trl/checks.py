"""The requirements of ``use_in``: TRL's own GRPOTrainer, a loss that we support, models without dropout."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_kernels.models.logits import in_mode, is_whole

KNOWN = "1.16"
"""The version of TRL that has these hooks."""
TRAINER = ("trl.trainer.grpo_trainer", "GRPOTrainer")
METHODS = ("_compute_loss", "_get_per_token_logps_and_entropies", "_generate_single_turn")
"""Methods of TRL's class that are replaced or relied on."""
SETTINGS = {
    "top_entropy_quantile": ("top_entropy_quantile", lambda value: value < 1),
    "off_policy_mask_threshold": ("off_policy_mask_threshold", lambda value: value is not None),
    "entropy_coef": ("_entropy_bonus_enabled", bool),
    "router_aux_loss_coef": ("aux_loss_enabled", bool),
}
"""Settings of terms that ``grpo_loss`` lacks -> the trainer's attribute, and a test whether it is set."""


def check_trainer(trainer: Any) -> None:
    """Refuse trainers with other hooks or another loss than TRL's GRPOTrainer.

    Raises:
        TypeError: a hook is missing, or a subclass overrides it.
        ValueError: ``use_in`` was called before, its loss has terms that ``grpo_loss`` lacks, or ZeRO-3 is on.
    """
    missing = [name for name in METHODS if not hasattr(type(trainer), name)]
    missing += [attribute for attribute, _ in SETTINGS.values() if not hasattr(trainer, attribute)]
    if missing:
        kind = type(trainer).__name__
        raise TypeError(f"trainer: expected the GRPOTrainer of TRL {KNOWN}, this {kind} has no {missing[0]}")
    for name in METHODS:
        method = getattr(type(trainer), name)
        if (method.__module__, method.__qualname__) != (TRAINER[0], f"{TRAINER[1]}.{name}"):
            kind = type(trainer).__name__
            raise TypeError(f"trainer: expected TRL's own {name}, {kind} has another, which would be lost")
    for name, (attribute, is_set) in SETTINGS.items():
        if is_set(getattr(trainer, attribute)):
            hint = "; set it to 0.0: TRL takes it from a mixture's config" if attribute == "aux_loss_enabled" else ""
            raise ValueError(f"{name}: expected a trainer without it, the loss has no such term{hint}")
    own = [name for name in METHODS if name in vars(trainer)]
    if own:
        raise ValueError(f"trainer: expected one that was not given to use_in before, its {own[0]} is replaced")
    plugin = getattr(trainer.args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError("deepspeed: expected ZeRO-2 at most, with stage 3 no rank holds the whole weight of the head")


def check_invariant(trainer: Any, models: Iterable[Any]) -> None:
    """Refuse models that compute a rollout and a training pass differently even under ``invariant``.

    Raises:
        ValueError: dropout is active, or there is a learned prompt, which stands before the padding.
    """
    if getattr(getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("peft_config: expected no learned prompt with invariant, it stands before the padding")
    for model in models:
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                got = f"{path} has {module.p}"
                raise ValueError(f"disable_dropout: expected no dropout with invariant, {got}; set it in GRPOConfig")
        if _is_random(model):
            raise ValueError("model: expected no dropout with invariant, set that of its config to 0")


def _is_random(model: Any) -> bool:
    """Say whether two training passes of a model differ, as with dropout."""
    weight = model.get_input_embeddings().weight
    if not is_whole(weight):
        # Sharded weights are gathered only when the whole model is called.
        return False
    ids = torch.arange(4, device=weight.device)[None]
    with _restored_generators(model), in_mode(model, training=True), torch.no_grad(), warnings.catch_warnings():
        # Activation checkpointing warns that no input requires grad.
        warnings.simplefilter("ignore")
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "return_dict": True}
        first, second = (model.base_model(**inputs).last_hidden_state.float() for _ in range(2))
    return bool((first - second).abs().max() > 0.01 * first.abs().max())


@contextmanager
def _restored_generators(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of the CPU and of a model's devices afterwards."""
    with torch.random.fork_rng(sorted({value.get_device() for value in model.parameters() if value.is_cuda})):
        yield
