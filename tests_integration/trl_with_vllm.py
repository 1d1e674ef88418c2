"""Train with TRL and vLLM's engine in its process, on a CPU; print what holds and what is refused, as JSON.

`python tests_integration/trl_with_vllm.py FOLDER`, in the environment that `test_trl_vllm.py` sets. Each line has a
setting, and its answer: an error of ``use_in``, or counts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_on_cpu import stand_in

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "num_iterations": 1, "gradient_checkpointing": True, "bf16": True}


def tell(setting: str, answer: Any) -> None:
    """Print one line of the table."""
    print(json.dumps([setting, answer]), flush=True)


def refusals(trainer: Any) -> None:
    """Print the errors for settings of a trainer with FP32 weights and an engine in BF16."""
    from rl_kernels.models.clients import trl

    config = trainer.vllm_generation.llm.llm_engine.vllm_config
    cases: dict[str, tuple[Any, str, Any]] = {
        "TRL's defaults: FP32 weights": (trainer, "temperature", 1.0),
        "repetition_penalty=1.1": (trainer, "repetition_penalty", 1.1),
        "RL_KERNELS_VLLM forgotten": (config, "additional_config", {}),
    }
    for name, (owner, attribute, value) in cases.items():
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        tell(name, error_of(trl.use_in, trainer, invariant=True, record=False))
        setattr(owner, attribute, before)
    trainer.top_p, trainer.num_iterations = 0.9, 2
    tell("top_p=0.9, num_iterations=2", error_of(trl.use_in, trainer, invariant=True, record=False))
    trainer.num_iterations, trainer.vllm_mode = 1, "server"
    tell("top_p=0.9, with a server", error_of(trl.use_in, trainer, invariant=True, record=False))
    trainer.top_p, trainer.vllm_mode = 1.0, "colocate"
    tell("README's line, with vLLM", error_of(trl.use_in, trainer, invariant=True))


def error_of(call: Any, *args: Any, **options: Any) -> str:
    """Return the message of the ValueError that a call raises."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("expected a ValueError")


def trained(trainer: Any) -> dict[str, Any]:
    """Train; count tokens that differ between vLLM and the training passes, and the FP32 weights that moved."""
    from transformers import TrainerCallback

    from rl_kernels.models.clients.trl.head import Head
    from rl_kernels.models.clients.trl.kept import IN_BATCH

    score, loss_of, rows = trainer._get_per_token_logps_and_entropies, trainer._compute_loss, []
    counts: dict[str, Any] = {"tokens": 0, "differ": 0, "kept": 0, "passes": 0}
    begun: list[torch.Tensor] = []

    class Snapshot(TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any, **options: Any) -> None:
            begun.extend(value.detach().clone() for value in weights(optimizer))

    def scored(*args: Any, **options: Any) -> Any:
        result = score(*args, **options)
        rows.append(result[0].detach())
        return result

    def loss(model: Any, inputs: Any) -> Any:
        result, mask = loss_of(model, inputs), inputs["completion_mask"].bool()
        counts["tokens"] += int(mask.sum())
        counts["differ"] += int((rows[-1] != inputs["sampling_per_token_logps"])[mask].sum())
        counts["kept"] += int((inputs.get(IN_BATCH, torch.full_like(rows[-1], -torch.inf))[mask] > -torch.inf).sum())
        return result

    def passed(self: Any, *args: Any) -> Any:
        counts["passes"] += 1
        return scores(self, *args)

    scores = Head.scores
    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, loss
    trainer.add_callback(Snapshot())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "scores", passed)
        trainer.train()
    moved = [int((a != b).sum()) for a, b in zip(begun, weights(trainer.optimizer), strict=True)]
    logs = [each for each in trainer.state.log_history if "reward" in each]
    counts["moved"] = sum(moved) / sum(value.numel() for value in begun)
    counts["rewards"] = [each["reward"] for each in logs]
    counts["furthest"] = [each["sampling/sampling_logp_difference/max"] for each in logs]
    return counts


def weights(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that an optimizer updates."""
    return [value for group in optimizer.param_groups for value in group["params"]]


def leave_processes() -> None:
    """Unset what TRL sets for vLLM: the next trainer would be one of several processes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)


def adapted(folder: Path, *, merged: bool, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    """Train an adapter that is not 0; with merged=False as PEFT computes, apart from the model."""
    import peft
    from small_trainer import trainer_in

    from rl_kernels.models.clients import trl

    # With FP32 weights the head is trained as a whole.
    whole = ["lm_head"] if compute_dtype else None
    options = {"target_modules": "all-linear", "init_lora_weights": False, "modules_to_save": whole}
    adapter = peft.LoraConfig(r=4, lora_alpha=8, **options)
    leave_processes()
    steps = {"max_steps": 16 if merged else 1, "beta": 0.02, "learning_rate": 2e-2}
    trainer = trainer_in(folder, adapter, sizes=SIZES, **ENGINE, **steps)
    base = {name: value for name, value in trainer.model.named_parameters() if "lora_" not in name}
    if compute_dtype is None:
        for value in base.values():
            value.data = value.data.bfloat16()
    before = {name: value.detach().bfloat16() for name, value in base.items()}
    if not merged:
        trl.merge_adapters = lambda model: None
    trl.use_in(trainer, invariant=True, record=False, compute_dtype=compute_dtype)
    counts = trained(trainer)
    counts["base"] = sum(int((value != before[name]).sum()) for name, value in base.items() if not value.requires_grad)
    return counts


def mixture(folder: Path) -> dict[str, Any]:
    """Train a small Qwen3-MoE of FP32 weights, whose engine is in BF16."""
    from small_trainer import EXPERTS, trainer_in

    from rl_kernels.models.clients import trl

    trainer = trainer_in(folder, sizes=EXPERTS, family="Qwen3Moe", **ENGINE, router_aux_loss_coef=0.0)
    trl.use_in(trainer, invariant=True, record=False, compute_dtype=torch.bfloat16)
    return trained(trainer)


def main(folder: Path) -> None:
    """Print the table."""
    stand_in()
    from small_trainer import trainer_in

    from rl_kernels.models.clients import trl

    # First: vLLM keeps the groups of a process's first model, and only a mixture's have one for experts.
    tell("Qwen3-MoE, compute_dtype", mixture(folder / "mixture"))
    leave_processes()
    trainer = trainer_in(folder / "whole", sizes=SIZES, **ENGINE, learning_rate=1e-6)
    refusals(trainer)
    trl.use_in(trainer, invariant=True, record=False, compute_dtype=torch.bfloat16)
    tell("FP32 weights, compute_dtype, 1e-6", trained(trainer))
    leave_processes()
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "beta": 0.02, "learning_rate": 1e-4}
    trainer = trainer_in(folder / "kept", sizes=SIZES, **ENGINE, **options)
    trl.use_in(trainer, invariant=True, record=False, compute_dtype=torch.bfloat16)
    tell("top_k=5, top_p=0.9, min_p=0.02", trained(trainer))
    cast = adapted(folder / "cast", merged=True, compute_dtype=torch.bfloat16)
    tell("LoRA of FP32 weights, compute_dtype", cast)
    tell("LoRA of BF16 weights", adapted(folder / "bf16", merged=True, compute_dtype=None))
    tell("LoRA as PEFT computes it", adapted(folder / "apart", merged=False, compute_dtype=None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
