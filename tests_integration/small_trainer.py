"""A small trainer of TRL, for tests and for scripts that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trl

WORDS = 16
"""Size of the vocabulary."""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = SIZES | {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3}
EXPERTS |= {"moe_intermediate_size": 24, "head_dim": 16}
"""Sizes of a small Qwen3-MoE."""

HYBRID: dict[str, Any] = SIZES | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HYBRID |= {"num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
"""Sizes of a small Qwen3.5."""


def trainer_in(
    folder: Path, adapter: Any = None, sizes: dict[str, Any] = SIZES, family: str = "Llama", **options: Any
) -> Any:
    """Return a trainer of a model of a family in a folder, with an adapter, and the options of ``GRPOConfig``."""
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS - 3)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    torch.manual_seed(0)
    tokens = {"vocab_size": WORDS, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**tokens, **sizes))
    # With a KL, TRL loads the reference from where the model came from, and vLLM loads the model from there.
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    usual = {
        "use_cpu": True,
        "report_to": [],
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "disable_tqdm": True,
        "seed": 3,
        "num_iterations": 2,
        "gradient_checkpointing": False,
        "bf16": False,
    }
    config = trl.GRPOConfig(output_dir=str(folder), **usual | options)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("w1")) - 0.1 * len(text.split()) for text in completions]

    data = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5"] * 8})
    made = {"model": model, "reward_funcs": reward, "args": config, "train_dataset": data, "peft_config": adapter}
    return trl.GRPOTrainer(**made, processing_class=tokenizer)
