"""Models of transformers under invariant(): alone, batched, padded, in chunks, the logits are the same bit for bit."""

import copy
import pickle

import pytest
import torch

from rl_kernels.models import invariant, pretrained


def differing(found):
    """Return in what surroundings a prompt has other bits than alone."""
    alone = {}
    return [(what, i) for what, i, logits in found if not torch.equal(logits, alone.setdefault(i, logits))]


def kinds(model):
    return [type(module) for module in model.modules()], model.config._attn_implementation


def same(found, expected):
    return all(torch.equal(one[2], two[2]) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llama(tiny, prompts, surroundings, dtype, device, torch_threads):
    """Nothing follows the surroundings or the threads; undone, the model and its logits are those before."""

    def logits(cuts=(1, 5, 16)):
        return list(surroundings(model, prompts, cuts, device))

    def fewer(found):
        return [each for each in found if each[0] not in ("chunks of 1", "chunks of 16")]

    model = tiny(dtype=dtype, device=device)
    plain, before = logits(), kinds(model)
    with invariant(model, strict=True):
        assert model.config._attn_implementation == pretrained.name()
        found = logits()
        assert differing(found) == []
        with torch_threads(2 if dtype == torch.float32 else 1), invariant(model.model):
            assert same(logits((5,)), fewer(found))
        assert model.config._attn_implementation == pretrained.name()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for (_, _, value), (_, _, other) in zip(found, plain, strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
    assert kinds(model) == before
    assert same(logits((5,)), fewer(plain))


def test_a_cache_changes_no_bit_under_autocast(tiny, prompts):
    """There keys are FP32, values BF16, and a cache makes FP32 of both."""
    model, ids = tiny(), prompts[0][None]
    with invariant(model, strict=True), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids, use_cache=True).logits, model(ids, use_cache=False).logits)


MODELS = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
    "Gemma": {"head_dim": 8},
    "Gemma2": {
        "head_dim": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 16,
        # The SDPA of transformers 5.17 leaves the cap out.
        "attn_implementation": "eager",
    },
    "Gemma3Text": {"head_dim": 8, "sliding_window": 4},
    "Phi": {},
    "Phi3": {},
    "GPTNeoX": {},
    "StableLm": {},
    "Starcoder2": {},
    "SmolLM3": {},
    "Granite": {},
    "Glm4": {"head_dim": 8},
    "Olmo2": {},
    "Cohere": {},
    "GPT2": {},
}
"""The families of the README's table, with what makes each its own."""
CUTS = ([16, 5, *[1] * 7, 5], [*[1] * 6, 27])
"""Chunks of a prompt of 33 tokens, more single ones than a window holds."""

OF_DEVICES = {"cpu": (torch.float32, 1e-3, 1e-4), "cuda": (torch.bfloat16, 0.1, 0.1)}
"""The dtype that models run in, and how near the stock model's logits are."""


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_other_models(tiny, prompts, surroundings, name, device):
    dtype, rtol, atol = OF_DEVICES[device.type]
    model = tiny(name, dtype, device, **MODELS[name])
    with torch.no_grad():
        plain = model(prompts[0][None].to(device)).logits[0]
    with invariant(model, strict=True) as handle:
        found = list(surroundings(model, prompts, CUTS, device))
        assert differing(found) == []
        assert ("Conv1D" in handle.swapped.values()) == (name == "GPT2")
    torch.testing.assert_close(found[0][2], plain, rtol=rtol, atol=atol * float(plain.abs().max()))


def test_frequencies_do_not_depend_on_where_the_model_was_made(tiny, prompts):
    """Powers of a GPU have other last bits; frequencies of another precision are the model's own."""

    def logits(model):
        with torch.no_grad(), invariant(model):
            return model(prompts[0][None]).logits

    model = tiny("Llama")
    frequencies = model.model.rotary_emb.inv_freq
    before, expected = frequencies.clone(), logits(model)
    moved = frequencies.nextafter(torch.tensor(torch.inf))
    frequencies.copy_(moved)
    assert torch.equal(logits(model), expected)
    assert torch.equal(frequencies, moved)
    frequencies.copy_(before.bfloat16())
    assert not torch.equal(logits(model), expected)


@pytest.mark.smoke
def test_trains_and_gradients_are_those_of_the_model(tiny, prompts, padded):
    model = tiny().train()
    batch, _ = padded(prompts)
    upstream = torch.randn(*batch["input_ids"].shape, 211, generator=torch.Generator().manual_seed(2))
    upstream *= batch["attention_mask"][..., None]

    def gradients():
        return torch.autograd.grad(model(**batch, use_cache=False).logits, list(model.parameters()), upstream)

    plain = gradients()
    with invariant(model):
        found = gradients()
    for (name, _), value, other in zip(model.named_parameters(), found, plain, strict=True):
        assert (value - other).norm() <= 1e-5 * other.norm(), name


def test_what_the_attention_cannot_do_is_said(tiny, prompts, monkeypatch):
    model = tiny(attention_dropout=0.5).train()
    ids = prompts[1][None]
    with invariant(model):
        with pytest.raises(ValueError, match="attention_dropout: expected 0 under invariant"):
            model(ids)
        model.eval()
        with pytest.raises(ValueError, match=r"attention_mask: expected \[B, S\]"):
            model(ids, attention_mask=torch.zeros(1, 1, 7, 7))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.warns(UserWarning, match="attention of the model .its attention does not go through"):
        invariant(model).undo()


def test_another_attention_set_later_is_told(tiny, prompts):
    model, ids = tiny(), prompts[1][None]
    told = "config: expected the attention of invariant.*got sdpa"
    for strict in (True, False):
        with invariant(model, strict=strict):
            for other in (model, copy.deepcopy(model)):
                other.set_attn_implementation("sdpa")
                with pytest.raises(ValueError, match=told) if strict else pytest.warns(UserWarning, match=told):
                    other(ids)
        model(ids)


MIXED = {
    "Lfm2": ({"layer_types": ["conv", "full_attention"]}, "model.layers.0.conv.conv"),
    "FalconH1": ({}, "model.layers.0.mamba.conv1d"),
    "MiniMax": ({"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}, "model.layers.0.self_attn"),
}
"""Hybrids, and a module of each whose output depends on the batch."""


@pytest.mark.parametrize("family", MIXED)
def test_convolutions_and_recurrences_are_told(tiny, family):
    options, name = MIXED[family]
    if not hasattr(pytest.importorskip("transformers"), f"{family}Config"):
        pytest.skip("this transformers does not have the model")
    model = tiny(family, **options)
    with pytest.raises(ValueError, match=r"model: left alone, and may depend on the batch: model\.layers\.0"):
        invariant(model, strict=True)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.config._attn_implementation != pretrained.name()
    with pytest.warns(UserWarning, match="may depend on the batch"), invariant(model) as handle:
        assert name in handle.left


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_copies_pickles_and_other_models_of_the_config(tiny, prompts, attention):
    """A deep copy is swapped and can be undone; a pickle, or a model of the config's copy, is stock."""
    transformers = pytest.importorskip("transformers")
    model, ids = tiny(), prompts[1][None]
    model.set_attn_implementation(attention)
    plain, before = model(ids).logits, kinds(model)
    with invariant(model, strict=True):
        expected = model(ids).logits
        reference, config = copy.deepcopy(model), copy.deepcopy(model.config)
        pickled = [pickle.dumps(each) for each in (model, copy.deepcopy(reference))]
        config._attn_implementation = attention
        made = transformers.AutoModelForCausalLM.from_config(config).eval()
        assert model.config._attn_implementation == pretrained.name()
    assert not any(b"rl_kernels" in each for each in pickled)
    made.load_state_dict(model.state_dict())
    assert torch.equal(reference(ids).logits, expected)
    invariant(reference).undo()
    for each in (*map(pickle.loads, pickled), made, reference, model):
        assert kinds(each) == before
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch.equal(each(ids).logits, plain)
