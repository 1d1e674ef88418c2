"""The head of a TRL trainer's model: labels scored by ours, beside TRL's own fused head on the same model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

from rl_kernels.models.clients.trl import head, use_in  # noqa: E402

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
    # Labels may be shifted already.
    shifted = {**batch, "shift_labels": batch["labels"].roll(-1, 1)}
    del shifted["labels"]
    _hooked(model, temperature=0.7)
    expected = [_scored(model, each) for each in (batch, shifted)]
    assert float(expected[0][0].min()) < -1
    head.score_with(model, head.Head(model, 0.7, in_fp32=False, entropy=True))
    for each, scores in zip((batch, shifted), expected, strict=True):
        _held(_scored(model, each), scores)
    # Elsewhere it is as it was.
    assert torch.equal(model(batch["input_ids"]).logits, logits)
    assert model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (3, 11)


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


def test_tokens_come_from_another_device() -> None:
    """As in a rollout of a model that is split: what the head is given is where the layer before it is."""
    model = _model("llama")
    seen = []

    class Ids:
        def to(self, device: torch.device) -> torch.Tensor:
            seen.append(device)
            return torch.arange(9)

    scorer = head.Head(model, 0.7, in_fp32=False, entropy=False)
    given: Any = Ids()
    assert scorer.logps(torch.randn(9, 32), given).shape == (9,)
    assert seen == [torch.device("cpu")]


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


def test_a_deep_copy_scores_and_computes_with_its_own_weights() -> None:
    model, other = _model("phi"), _model("phi")
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.25)
    for each in (model, other):
        _hooked(each, temperature=0.7)
        head.score_with(each, head.Head(each, 0.7, in_fp32=False, entropy=True))
    batch = _batch(model)
    before, expected = _scored(model, batch), _scored(other, batch)
    copied = copy.deepcopy(copy.deepcopy(model))
    copied.load_state_dict(other.state_dict())
    assert all(map(torch.equal, _scored(copied, batch), expected))
    assert torch.equal(copied(batch["input_ids"]).logits, other(batch["input_ids"]).logits)
    assert all(map(torch.equal, _scored(model, batch), before))


def test_a_prepared_model_keeps_its_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's reference model, around whose head accelerate puts autocast."""
    accelerate = pytest.importorskip("accelerate")
    # A process has one state, which trainers of other tests made without mixed precision.
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    model = _model("llama")
    batch, accelerator = _batch(model), accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    _hooked(model)
    plain = copy.deepcopy(model)
    accelerator.prepare_model(model, evaluation_mode=True)
    for each in (plain, model):
        head.score_with(each, head.Head(each, 1.0, in_fp32=False, entropy=True), around=accelerator.autocast)
    with torch.no_grad():
        found, expected = model(**batch, fused_lm_head=True), plain(**batch, fused_lm_head=True)
        assert not torch.equal(found.log_probs, expected.log_probs)
        with accelerator.autocast():
            expected = plain(**batch, fused_lm_head=True)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert torch.equal(found.entropy, expected.entropy)


def test_a_head_that_accelerate_moves_inputs_for(trainer_of: Callable[..., Any], tmp_path: Path) -> None:
    """As where ``device_map`` split a model."""
    hooks = pytest.importorskip("accelerate").hooks
    trainer = trainer_of(tmp_path)
    for module in (trainer.model.model, trainer.model.lm_head):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    ids = torch.arange(12).view(2, 6) + 3
    given = (trainer.model, ids, torch.ones_like(ids), 4)
    expected, *_ = trainer._get_per_token_logps_and_entropies(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_in(trainer)
    found, *_ = trainer._get_per_token_logps_and_entropies(*given)
    torch.testing.assert_close(found, expected)
