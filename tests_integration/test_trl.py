"""A real client: TRL's GRPOTrainer with our loss, beside TRL's own on the same tensors and through some steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

from rl_kernels.grpo_loss import Objective  # noqa: E402
from rl_kernels.models.clients import trl as trl_client  # noqa: E402

ROOT = Path(__file__).parents[1]
STEPS, WORDS = 4, 16


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("objectives_table", ROOT / "tools" / "objectives_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _tool()


@pytest.mark.parametrize(("loss_type", "level", "option"), tool.cells())
def test_loss_and_gradient_are_those_of_trl(loss_type: str, level: str, option: str) -> None:
    # TRL rounds the temperatures of sapo to FP32, whatever the dtype.
    exact = 1e-7 if loss_type == "sapo" else 1e-14
    assert max(tool.difference(loss_type, level, option, torch.float64)) < exact
    assert max(tool.difference(loss_type, level, option, torch.float32)) < 1e-6


def test_the_table_of_the_page_is_of_these_types() -> None:
    text = tool.PAGE.read_text(encoding="utf-8").split(tool.BEGIN)[1].split(tool.END)[0]
    assert all(f"| `{name}` | " in text for name in tool.TYPES)


@pytest.mark.parametrize("loss_type", tool.TYPES)
def test_preset_is_the_default_configuration(loss_type: str) -> None:
    found = dict(vars(trl_client.objective(tool.trainer_of(loss_type))))
    made = vars(Objective.preset(f"trl-1.16:{loss_type}"))
    # Advantages come from TRL itself; what follows from the options is theirs again.
    for name in ("advantage_estimator", "eps", "eps_placement", "skip_nan", "plan", "numbers", "estimator"):
        del found[name]
    # What TRL's documentation says to change from its defaults, for these two.
    for name in {"luspo": ("importance_level",), "cispo": ("cispo_cap", "clip_high")}.get(loss_type, ()):
        del found[name]
    assert {name: made[name] for name in found} == found


@pytest.mark.parametrize("loss_type", [name for name in tool.TYPES if name != "bnpo"])
def test_split_of_a_batch_changes_no_bit_of_its_gradient(loss_type: str) -> None:
    logps, inputs = tool.batch_of(torch.float32)
    trainer, grads, losses = tool.trainer_of(loss_type, beta=0.1), [], []
    for size in (1, 2, 4, 8):
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = tool.BATCH // size
        parts = []
        for i in range(0, tool.BATCH, size):
            part = {name: value[i : i + size] if value.ndim else value for name, value in inputs.items()}
            leaf = logps[i : i + size].clone().requires_grad_()
            loss = trl_client.compute_loss(trainer, leaf, part)
            parts.append(torch.autograd.grad(loss, leaf)[0])
            losses.append(float(loss.detach()) * size / tool.BATCH)
        grads.append(torch.cat(parts))
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_a_term_that_our_loss_has_not_is_refused() -> None:
    trainer = tool.trainer_of("grpo")
    trainer.top_entropy_quantile = 0.8
    with pytest.raises(ValueError, match="top_entropy_quantile: expected a trainer without it"):
        trl_client.use_in(trainer)


def _trainer(folder: Path, **options: Any) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS - 3)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, eos_token_id=0, pad_token_id=1, bos_token_id=0, **sizes))
    # With a KL, TRL loads the reference from where the model came from.
    model.save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        disable_tqdm=True,
        seed=3,
        gradient_checkpointing=False,
        **options,
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("w1")) - 0.1 * len(text.split()) for text in completions]

    data = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5"] * 8})
    made = {"model": model, "reward_funcs": reward, "args": config, "train_dataset": data}
    return trl.GRPOTrainer(**made, processing_class=tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "grpo", "beta": 0.1, "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ],
    ids=lambda options: options["loss_type"],
)
def test_training_steps_are_those_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, **options)
    theirs = trainer._compute_loss
    trl_client.use_in(trainer)
    ours, pairs, advantages = trainer._compute_loss, [], []

    def both(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        parameters = [value for value in model.parameters() if value.requires_grad]
        losses = [function(model, inputs) for function in (theirs, ours)]
        grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        pairs.append((losses, grads))
        advantages.append(inputs["advantages"].abs().max())
        return losses[1]

    trainer._compute_loss = both
    before = [value.detach().clone() for value in trainer.model.parameters()]
    trainer.train()
    assert len(pairs) == 2 * STEPS
    assert max(advantages) > 0.1
    for (their_loss, our_loss), (their_grads, our_grads) in pairs:
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-5, atol=1e-6)
        size = max(float(grad.abs().max()) for grad in their_grads)
        for found, expected in zip(our_grads, their_grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6 * max(size, 1e-3))
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
