"""Modules that come into an invariant model later: swapped, told or refused when they are assigned, and undone."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from rl_kernels.det_gemm import DetLinear
from rl_kernels.models import invariant, swap

peft = pytest.importorskip("peft")
LlamaDecoderLayer = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaDecoderLayer
LlamaConfig = pytest.importorskip("transformers").LlamaConfig
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def with_adapter(model):
    model.add_adapter(peft.LoraConfig(**LORA))
    return model


def with_second_adapter(model):
    found = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    found.add_adapter("second", peft.LoraConfig(**LORA))
    found.set_adapter("second")
    return found


def merged(model):
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).merge_and_unload()


def larger(model):
    model.resize_token_embeddings(230, mean_resizing=False)
    return model


def assigned(model):
    model.lm_head = nn.Linear(32, 40)
    model.model.layers[0].mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32, dtype=torch.float64).float())
    return model


def trained_whole(model):
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, modules_to_save=["lm_head", "norm"]))


def replicated(model):
    """PEFT copies layers, with the configs that they keep."""
    model.config.use_cache = False
    return peft.get_peft_model(model, peft.LoraConfig(**LORA, layer_replication=[[0, 2], [0, 2]]))


def inserted(model):
    """PyTorch does not call its registration hooks; the next forward pass takes the layer in."""
    model.config.use_cache = False
    layer = LlamaDecoderLayer(LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4), 0)
    layer.self_attn.config._attn_implementation = "sdpa"
    model.model.layers.insert(1, layer)
    model(torch.ones(1, 2).long())
    return model


CHANGES = [replicated, inserted, with_adapter, with_second_adapter, merged, larger, assigned, trained_whole]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_new_layers_are_swapped_and_undone(tiny, prompts, change):
    """In the model, and in a deep copy of it."""
    for deep in (False, True):
        model, before = tiny(), set(swap._held)
        handle = invariant(model, strict=True)
        changed = change(copy.deepcopy(model) if deep else model).eval()
        stock = [name for name, module in changed.named_modules() if type(module) in (nn.Linear, nn.LayerNorm)]
        assert stock == []
        with torch.no_grad():
            whole = changed(prompts[2][None]).logits
            for length in (1, 7, 20):
                assert torch.equal(changed(prompts[2][None, :length]).logits, whole[:, :length])
        if deep:
            invariant(changed).undo()
        handle.undo()
        for module in changed.modules():
            assert not isinstance(module, DetLinear)
            assert not hasattr(module, "_invariant_marks")
        assert swap._held.keys() <= before


def test_adapters_of_other_kinds_are_told(tiny):
    """They multiply by weights of their own, in functions of their own; those that scale alone are known."""
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    invariant(peft.get_peft_model(tiny(), config), strict=True).undo()
    adapters = [
        peft.LoHaConfig(r=4, target_modules=["q_proj"]),
        peft.VeraConfig(r=4, target_modules=["q_proj"]),
        peft.FourierFTConfig(n_frequency=9, target_modules=["q_proj"]),
        peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        peft.HRAConfig(r=4, target_modules=["q_proj"]),
    ]
    told = "may depend on the batch: .*q_proj"
    for config in adapters:
        adapter = peft.get_peft_model(tiny(), config)
        with pytest.raises(ValueError, match=told):
            invariant(adapter, strict=True)
        model = tiny()
        with invariant(model, strict=True), pytest.raises(ValueError, match=told):
            peft.get_peft_model(model, config)
        model = tiny()
        with invariant(model) as handle, pytest.warns(UserWarning, match=told):
            peft.get_peft_model(model, config)
        assert any("q_proj" in name for name in handle.left)


def test_what_is_added_elsewhere_or_after_undo_stays_stock():
    made, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential()
    handle = invariant(made)
    other.append(nn.Linear(4, 4))
    made.append(nn.Sequential(nn.Linear(4, 4)))
    assert (type(other[0]), handle.swapped["1.0"]) == (nn.Linear, "Linear")
    handle.undo()
    made.append(nn.Linear(4, 4))
    assert [type(module) for module in (made[0], made[1][0], made[2])] == [nn.Linear] * 3


def test_a_handle_that_nobody_kept_still_takes_in_and_frees():
    made = nn.Sequential(nn.Linear(4, 4))
    invariant(made)
    made.append(nn.Linear(4, 4))
    assert isinstance(made[1], DetLinear)
    with pytest.warns(UserWarning, match=r"1 \(its weight is torch\.float64"):
        made[1] = nn.Linear(4, 4, dtype=torch.float64)
    gc.disable()
    gone = weakref.ref(made[0])
    del made
    gc.enable()
    assert gone() is None


def test_layers_copied_by_peft_before(tiny, prompts):
    model = replicated(tiny(use_cache=False))
    with invariant(model, strict=True), torch.no_grad():
        assert torch.equal(model(prompts[2][None, :7]).logits, model(prompts[2][None]).logits[:, :7])
    assert {layer.self_attn.config._attn_implementation for layer in model.model.model.layers} == {"sdpa"}


@torch.no_grad()
def test_encoders_of_learnt_prompts(tiny, prompts):
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=37
    )
    model = tiny()
    handle = invariant(model, strict=True)
    found = peft.get_peft_model(model, config).eval()
    rows = prompts[2][:20].expand(5, -1)
    assert torch.equal(found(rows).logits[:1], found(rows[:1]).logits)
    handle.undo()
    assert not any(isinstance(module, DetLinear) for module in found.modules())
    recurrent = peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_reparameterization_type="LSTM"
    )
    with invariant(model, strict=True), pytest.raises(ValueError, match=r"prompt_encoder\.default\.lstm_head"):
        peft.get_peft_model(model, recurrent)
