"""A real client: TRL's GRPOTrainer with our loss, beside TRL's own on the same tensors and through some steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
from rl_kernels.models.clients.trl import head  # noqa: E402

ROOT = Path(__file__).parents[1]


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


def test_tokens_of_tools_count_nowhere() -> None:
    logps, inputs = tool.batch_of(torch.float64)
    inputs["tool_mask"] = (torch.arange(logps.numel()).view(logps.shape) % 3 > 0).long()
    entropy = torch.linspace(0, 1, logps.numel(), dtype=torch.float64).view(logps.shape)
    for loss_type in ("dapo", "grpo", "cispo", "vespo"):
        found = []
        for loss_of in (tool.GRPOTrainer._compute_loss, trl_client.compute_loss):
            trainer = tool.trainer_of(loss_type, beta=0.1)
            trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (model, entropy, None)
            leaf = logps.clone().requires_grad_()
            loss = loss_of(trainer, leaf, inputs)
            found.append(({"loss": [loss.item()], **trainer._metrics["train"]}, *torch.autograd.grad(loss, leaf)))
        (their_numbers, their_grad), (our_numbers, our_grad) = found
        torch.testing.assert_close(our_grad, their_grad)
        assert our_numbers.keys() == their_numbers.keys()
        for name, values in their_numbers.items():
            torch.testing.assert_close(our_numbers[name], values, msg=name)


CASES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "an evaluation": lambda trainer, _: setattr(trainer.model, "training", False),
    "three processes": lambda trainer, _: setattr(trainer.accelerator, "num_processes", 3),
    "longer completions": lambda trainer, _: setattr(trainer, "max_completion_length", 50),
    "a delta": lambda trainer, _: setattr(trainer.args, "delta", 1.3),
    "a completion without tokens": lambda _, inputs: inputs["completion_mask"][2].zero_(),
    "no token": lambda _, inputs: (inputs["completion_mask"].zero_(), inputs["num_items_in_batch"].zero_()),
    "a ratio": lambda _, inputs: inputs.update(tool.batch_of(torch.float64, "token")[1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss_type", tool.TYPES)
def test_numbers_of_other_batches_are_those_of_trl(loss_type: str, case: str) -> None:
    found = []
    for loss_of in (tool.GRPOTrainer._compute_loss, trl_client.compute_loss):
        trainer, (logps, inputs) = tool.trainer_of(loss_type, beta=0.1), tool.batch_of(torch.float64)
        CASES[case](trainer, inputs)
        leaf = logps.clone().requires_grad_()
        loss = loss_of(trainer, leaf, inputs)
        metrics = {(mode, name): values for mode, part in trainer._metrics.items() for name, values in part.items()}
        found.append(({"loss": [loss.item()], **metrics}, *torch.autograd.grad(loss, leaf)))
    (their_numbers, their_grad), (our_numbers, our_grad) = found
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-6, atol=1e-12)
    assert our_numbers.keys() == their_numbers.keys()
    for name, values in their_numbers.items():
        torch.testing.assert_close(our_numbers[name], values, rtol=1e-6, atol=1e-12, equal_nan=True, msg=str(name))


def test_how_far_tokens_are_from_what_was_sampled_is_logged_once() -> None:
    """From old log-probabilities where there are some. Where vLLM samples, TRL logs it."""
    logps, inputs = tool.batch_of(torch.float64)
    inputs["tool_mask"] = (torch.arange(logps.numel()).view(logps.shape) % 3 > 0).long()
    mask, old = (inputs["completion_mask"] * inputs["tool_mask"]).bool(), inputs["old_per_token_logps"]
    inputs["sampling_per_token_logps"] = torch.where(mask, logps + old, 0.0)
    for first in (old, None):
        trainer = tool.trainer_of("dapo")
        trl_client.compute_loss(trainer, logps, {**inputs, "old_per_token_logps": first})
        away = (logps if first is not None else old).abs()[mask]
        for name, value in (("mean", away.mean()), ("max", away.max())):
            (found,) = trainer._metrics["train"][f"sampling/sampling_logp_difference/{name}"]
            assert found == pytest.approx(value.item())
    trainer = tool.trainer_of("dapo")
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, False
    trl_client.compute_loss(trainer, logps, inputs)
    assert not any(name.startswith("sampling") for name in trainer._metrics["train"])


def test_images_reach_the_model() -> None:
    logps, inputs = tool.batch_of(torch.float32)
    inputs |= {"pixel_values": torch.rand(2, 3), "image_sizes": torch.tensor([[1, 2]])}
    given = {}

    def scores(model: Any, *_: Any, **options: Any) -> Any:
        given.update(options)
        return model, torch.zeros_like(model), None

    trainer = tool.trainer_of("dapo")
    trainer._get_per_token_logps_and_entropies = scores
    trl_client.compute_loss(trainer, logps, inputs)
    assert all(given[name] is inputs[name] for name in ("pixel_values", "image_sizes"))
    assert "num_tiles" not in given


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("top_entropy_quantile", "top_entropy_quantile", 0.8),
        ("off_policy_mask_threshold", "off_policy_mask_threshold", 0.0),
        ("entropy_coef", "_entropy_bonus_enabled", True),
        ("router_aux_loss_coef", "aux_loss_enabled", True),
    ],
)
def test_a_term_that_our_loss_has_not_is_refused(name: str, attribute: str, value: object) -> None:
    trainer = tool.trainer_of("grpo")
    setattr(trainer, attribute, value)
    with pytest.raises(ValueError, match=f"^{name}: expected a trainer without it"):
        trl_client.use_in(trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "grpo", "beta": 0.1, "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "vespo", "temperature": 0.7},
        {"loss_type": "bnpo", "delta": 1.1, "cast_lm_head_to_fp32": True},
    ],
    ids=lambda options: options["loss_type"],
)
def test_training_steps_are_those_of_trl(
    trainer_of: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, **options)
    names = ("model", "ref_model")
    models = [getattr(trainer, name) for name in names if getattr(trainer, name) is not None]
    theirs, heads = trainer._compute_loss, [model.forward for model in models]
    trl_client.use_in(trainer)
    ours, our_heads = trainer._compute_loss, [model.forward for model in models]
    pairs, advantages, metrics = [], [], []

    def both(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        parameters = [value for value in model.parameters() if value.requires_grad]
        losses, logged = [], []
        for function, forwards in ((theirs, heads), (ours, our_heads)):
            trainer._metrics["train"].clear()
            for each, forward in zip(models, forwards, strict=True):
                each.forward = forward
            losses.append(function(model, inputs))
            logged.append({name: list(values) for name, values in trainer._metrics["train"].items()})
        grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        pairs.append((losses, grads))
        metrics.append(logged)
        advantages.append(inputs["advantages"].abs().max())
        return losses[1]

    trainer._compute_loss = both
    before = [value.detach().clone() for value in trainer.model.parameters()]
    trainer.train()
    assert len(pairs) == 2 * trainer.args.max_steps
    assert max(advantages) > 0.1
    for (their_loss, our_loss), (their_grads, our_grads) in pairs:
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-5, atol=1e-6)
        size = max(float(grad.abs().max()) for grad in their_grads)
        for found, expected in zip(our_grads, their_grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6 * max(size, 1e-3))
    for their_metrics, our_metrics in metrics:
        assert our_metrics.keys() == their_metrics.keys()
        for name, values in their_metrics.items():
            torch.testing.assert_close(our_metrics[name], values, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0, "tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.3},
    "phi": {},
}


def _model(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        **FAMILIES[family],
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases away from 1 and 0, and logits of some size.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _batch(model: Any) -> dict[str, torch.Tensor]:
    """Return a batch that is padded on both sides, and labels of its completions."""
    torch.manual_seed(1)
    ids = torch.randint(2, 50, (3, 9))
    attention = torch.ones_like(ids)
    attention[0, :3] = attention[1, 7:] = 0
    labels = ids.masked_fill(attention == 0, -100)
    labels[:, :5] = -100
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def _scored(model: Any, batch: dict[str, torch.Tensor], entropy: bool = True) -> list[torch.Tensor]:
    """Return log-probabilities, entropy and the gradients of both."""
    found = model(**batch, fused_lm_head=True)
    outputs = [found.log_probs, found.entropy] if entropy else [found.log_probs]
    parameters = [value for value in model.parameters() if value.requires_grad]
    total = sum((output * torch.linspace(0.5, 1, output.numel()).view(output.shape)).sum() for output in outputs)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(total, parameters, allow_unused=True)]


def _held(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5 * max(1.0, float(other.abs().max())))


def _hooked(model: Any, **options: Any) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy"), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_head_of_trl(family: str) -> None:
    model = _model(family)
    batch, logits = _batch(model), model(_batch(model)["input_ids"]).logits
    _hooked(model, temperature=0.7)
    expected = _scored(model, batch)
    assert float(expected[0].min()) < -1
    head.score_with(model, head.Head(model, 0.7, in_fp32=False, entropy=True))
    _held(_scored(model, batch), expected)
    # Elsewhere it is as it was.
    assert torch.equal(model(batch["input_ids"]).logits, logits)
    assert model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (3, 11)


def test_labels_that_are_shifted_already() -> None:
    model = _model("llama")
    _hooked(model, temperature=0.7)
    batch = _batch(model)
    batch["shift_labels"] = batch.pop("labels").roll(-1, 1)
    expected = _scored(model, batch)
    head.score_with(model, head.Head(model, 0.7, in_fp32=False, entropy=True))
    _held(_scored(model, batch), expected)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_a_product_in_fp32_stays_so_under_autocast(family: str) -> None:
    model = _model(family)
    scorer = head.Head(model, 0.7, in_fp32=True, entropy=False)
    rows, ids = torch.randn(9, 32), torch.arange(9)
    logits = model.get_output_embeddings()(rows.double().float()) / 0.7
    with torch.autocast("cpu", torch.bfloat16):
        found = scorer.logps(rows, ids)
    expected = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_tokens_stand_behind_their_padding_or_where_generate_lets_them() -> None:
    model, seen = _model("llama"), []
    _hooked(model)
    theirs, batch = model.forward, _batch(model)
    model.base_model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given.get("position_ids")), with_kwargs=True
    )
    given = torch.arange(9)[None] + 5
    for places, position_ids in ((False, None), (True, None), (True, given)):
        model.forward = theirs
        head.score_with(model, head.Head(model, 1.0, in_fp32=False, entropy=False), places=places)
        model(**batch, position_ids=position_ids, fused_lm_head=True)
    assert seen[0] is None
    assert seen[1].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 6, 6], [*range(9)]]
    assert seen[2] is given


def test_scores_without_a_label_are_zeros_with_a_gradient() -> None:
    model = _model("llama")
    _hooked(model)
    head.score_with(model, head.Head(model, 1.0, in_fp32=False, entropy=False))
    batch = _batch(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    found = model(**batch, fused_lm_head=True)
    assert found.entropy is None
    assert not found.log_probs.any()
    found.log_probs.sum().backward()
    assert model.get_output_embeddings().weight.grad is not None


@pytest.mark.parametrize("where", ["attention", "head", "head as a whole"])
def test_scores_with_an_adapter_are_those_of_trl(where: str) -> None:
    peft = pytest.importorskip("peft")
    model = _model("llama")
    _hooked(model, temperature=1.3)
    target = ["lm_head"] if where == "head" else ["q_proj", "v_proj"]
    saved = ["lm_head"] if where == "head as a whole" else None
    adapter = peft.LoraConfig(r=4, target_modules=target, modules_to_save=saved, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, adapter)
    if saved:
        torch.nn.init.normal_(model.lm_head.modules_to_save["default"].weight, std=0.2)
    batch = _batch(model)
    if where != "head":
        expected = _scored(wrapped, batch)
    else:
        # TRL's own head reads the weight below the adapter.
        logits = wrapped(batch["input_ids"], batch["attention_mask"]).logits[:, :-1] / 1.3
        logps = logits.log_softmax(-1).gather(-1, batch["labels"][:, 1:, None].clamp(min=0))[..., 0]
        expected = [logps.masked_fill(batch["labels"][:, 1:] == -100, 0.0).detach()]
    head.score_with(model, head.Head(model, 1.3, in_fp32=False, entropy=True))
    _held(_scored(wrapped, batch)[: len(expected)], expected)


def test_what_is_not_computed_is_refused_by_name(trainer_of: Callable[..., Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    del trainer.model.forward
    with pytest.raises(TypeError, match=r"^trainer: expected TRL's GRPOTrainer with a fused head .* TRL 1\.16"):
        trl_client.use_in(trainer)


def test_the_reference_is_scored_through_its_own_head(trainer_of: Callable[..., Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, beta=0.1)
    with torch.no_grad():
        trainer.ref_model.lm_head.weight.neg_()
    ids = torch.arange(12).view(2, 6) + 3
    given = (trainer.ref_model, ids, torch.ones_like(ids), 4)
    expected, *_ = trainer._get_per_token_logps_and_entropies(*given)
    trl_client.use_in(trainer)
    found, *_ = trainer._get_per_token_logps_and_entropies(*given)
    torch.testing.assert_close(found, expected)


def test_options_reach_the_loss(trainer_of: Callable[..., Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trl_client.use_in(trainer, backend="abacus")
    with pytest.raises(ValueError, match="abacus"):
        trainer.train()
