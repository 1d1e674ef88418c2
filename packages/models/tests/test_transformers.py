"""Models of transformers under invariant(): alone, batched, padded, in chunks, the logits are the same bit for bit."""

import copy
import pickle

import pytest
import torch

from rl_kernels.models import invariant, pretrained

DTYPES = [torch.float32, torch.bfloat16]


def padded(prompts, *, left, more=0):
    """Return a batch as a tokenizer and ``generate`` make it, and where each prompt stands in it."""
    width = max(map(len, prompts)) + more
    ids, mask, places = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width).long(), []
    for row, prompt in enumerate(prompts):
        first = width - len(prompt) if left else 0
        places.append((row, slice(first, first + len(prompt))))
        ids[places[-1]], mask[places[-1]] = prompt, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, places


@torch.no_grad()
def surroundings(model, prompts, device="cpu"):
    """Yield (what, prompt, its logits): first alone, then in everything that must change no bit."""

    def run(**inputs):
        return model(**{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()})

    for index, prompt in enumerate(prompts):
        yield "alone", index, run(input_ids=prompt[None], use_cache=False).logits[0]
    for what, given in {
        "left": {"left": True, "more": 3},
        "right": {"left": False, "more": 5},
    }.items():
        batch, places = padded(prompts, **given)
        logits = run(**batch, use_cache=False).logits
        for index, place in enumerate(places):
            yield what, index, logits[place]
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    for cut in (1, 5, 16):
        cache, parts = None, []
        for part in prompts[longest].split(cut):
            output = run(input_ids=part[None], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits[0])
        yield f"chunks of {cut}", longest, torch.cat(parts)
    batch, places = padded(prompts, left=True)
    half, cache, parts = batch["input_ids"].shape[1] // 2, None, []
    for step in (slice(0, half), slice(half, None)):
        seen = {"attention_mask": batch["attention_mask"][:, : step.stop]}
        given = {name: batch[name][:, step] for name in ("input_ids", "position_ids")}
        output = run(**given, **seen, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    logits = torch.cat(parts, 1)
    for index, place in enumerate(places):
        yield "batch in chunks", index, logits[place]


def differing(model, prompts, device="cpu"):
    """Return in what surroundings a prompt has other bits than alone."""
    alone, found = {}, []
    for what, index, logits in surroundings(model, prompts, device):
        if not torch.equal(logits, alone.setdefault(index, logits)):
            found.append((what, index))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama(tiny, prompts, dtype, device):
    model = tiny(dtype=dtype, device=device)
    plain = [logits for _, _, logits in surroundings(model, prompts, device)]
    with invariant(model, strict=True):
        assert differing(model, prompts, device) == []
        found = [logits for _, _, logits in surroundings(model, prompts, device)]
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for value, other in zip(found, plain, strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def test_a_cache_changes_no_bit_under_autocast(tiny, prompts):
    """There keys are FP32, values BF16, and a cache makes FP32 of both."""
    model, ids = tiny(), prompts[0][None]
    with invariant(model, strict=True), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids, use_cache=True).logits, model(ids, use_cache=False).logits)


def test_llama_without_it_follows_the_batch(tiny, prompts):
    """The control: were this not so somewhere, the test above would show nothing."""
    if not differing(tiny(), prompts):
        pytest.skip("on this machine PyTorch gives this model the same rows in all these batches")


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(tiny, prompts, threads, torch_threads):
    model = tiny()
    with invariant(model), torch_threads(threads):
        assert differing(model, prompts) == []


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
}
"""The families of the README's table, with what makes each its own."""


OF_DEVICES = {"cpu": (torch.float32, 1e-3, 1e-4), "cuda": (torch.bfloat16, 0.1, 0.1)}
"""The dtype that models run in, and how near the stock model's logits are."""


@pytest.mark.parametrize("name", MODELS)
def test_other_models(tiny, prompts, name, device):
    dtype, rtol, atol = OF_DEVICES[device.type]
    model = tiny(name, dtype, device, **MODELS[name])
    with torch.no_grad():
        plain = model(prompts[0][None].to(device)).logits
    with invariant(model, strict=True):
        assert differing(model, prompts, device) == []
        with torch.no_grad():
            found = model(prompts[0][None].to(device)).logits
    torch.testing.assert_close(found, plain, rtol=rtol, atol=atol * float(plain.abs().max()))


def test_gpt2(tiny, prompts, device):
    model = tiny("GPT2", OF_DEVICES[device.type][0], device)
    with invariant(model, strict=True) as handle:
        assert "Conv1D" in handle.swapped.values()
        assert differing(model, prompts, device) == []


def test_everything_comes_back(tiny, prompts):
    model = tiny()
    before = [type(module) for module in model.modules()], model.config._attn_implementation
    plain = [logits for _, _, logits in surroundings(model, prompts)]
    with invariant(model):
        assert model.config._attn_implementation == pretrained.name()
        with invariant(model.model):
            pass
        assert model.config._attn_implementation == pretrained.name()
    assert ([type(module) for module in model.modules()], model.config._attn_implementation) == before
    found = [logits for _, _, logits in surroundings(model, prompts)]
    assert all(torch.equal(value, other) for value, other in zip(found, plain, strict=True))


def test_generate_draws_the_tokens_of_a_prompt_alone(tiny, prompts):
    model = tiny()
    batch, _ = padded(prompts, left=True)
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    with invariant(model):
        whole = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **given)
        alone = model.generate(prompts[1][None], attention_mask=torch.ones(1, len(prompts[1])).long(), **given)
    assert torch.equal(whole.sequences[1, -6:], alone.sequences[0, -6:])
    assert all(torch.equal(one[1], two[0]) for one, two in zip(whole.logits, alone.logits, strict=True))


def test_trains_and_gradients_are_those_of_the_model(tiny, prompts):
    model = tiny().train()
    batch, _ = padded(prompts, left=True)
    upstream = torch.randn(*batch["input_ids"].shape, 211, generator=torch.Generator().manual_seed(2))
    upstream *= batch["attention_mask"][..., None]

    def gradients():
        return torch.autograd.grad(model(**batch, use_cache=False).logits, list(model.parameters()), upstream)

    plain = gradients()
    with invariant(model):
        found = gradients()
    for (name, _), value, other in zip(model.named_parameters(), found, plain, strict=True):
        assert (value - other).norm() <= 1e-5 * other.norm(), name


def test_compiled_in_one_graph(tiny, prompts):
    torch.compiler.reset()
    model = tiny()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch, _ = padded(prompts[:2], left=True)
    with torch.no_grad(), invariant(model):
        assert torch.equal(run(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits)


def test_what_the_attention_cannot_do_is_said(tiny, prompts):
    model = tiny(attention_dropout=0.5).train()
    ids = prompts[1][None]
    with invariant(model):
        with pytest.raises(ValueError, match="attention_dropout: expected 0 under invariant"):
            model(ids)
        model.eval()
        with pytest.raises(ValueError, match=r"attention_mask: expected \[B, S\]"):
            model(ids, attention_mask=torch.zeros(1, 1, 7, 7))


def test_a_model_that_keeps_its_attention_is_told(tiny, monkeypatch):
    model = tiny()
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
    "Mixtral": ({"num_local_experts": 4}, "model.layers.0.mlp.experts"),
    "Qwen3Moe": ({"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "model.layers.0.mlp.experts"),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "model.layers.0.mlp.experts"),
    "Lfm2": ({"layer_types": ["conv", "full_attention"]}, "model.layers.0.conv.conv"),
    "FalconH1": ({}, "model.layers.0.mamba.conv1d"),
    "Qwen3_5Text": ({"layer_types": ["linear_attention", "full_attention"]}, "model.layers.0.linear_attn.conv1d"),
    "MiniMax": ({"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}, "model.layers.0.self_attn"),
}
"""Mixtures and hybrids, and a module of each whose output depends on the batch."""


@pytest.mark.parametrize("family", MIXED)
def test_experts_convolutions_and_recurrences_are_told(tiny, family):
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
def test_a_deep_copy_is_swapped_and_can_be_undone(tiny, prompts, attention):
    model, ids = tiny(), prompts[1][None]
    model.set_attn_implementation(attention)
    with invariant(model, strict=True), torch.no_grad():
        reference = copy.deepcopy(model)
        expected = model(ids).logits
    with torch.no_grad():
        assert torch.equal(reference(ids).logits, expected)
        invariant(reference).undo()
        assert type(reference.lm_head) is torch.nn.Linear
        assert reference.config._attn_implementation == attention
        assert torch.equal(reference(ids).logits, model(ids).logits)


def test_a_pickle_holds_the_attention_that_the_model_had(tiny, prompts):
    model, ids = tiny(), prompts[1][None]
    with torch.no_grad():
        expected = model(ids).logits
        with invariant(model):
            copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
        copies[1:] = [pickle.loads(pickle.dumps(copies[1]))]
        for read in copies:
            assert read.config._attn_implementation == "sdpa"
            assert torch.equal(read(ids).logits, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_made_from_a_copy_of_a_swapped_config_is_stock(tiny, prompts, attention):
    transformers = pytest.importorskip("transformers")
    model, ids = tiny(), prompts[1][None]
    model.set_attn_implementation(attention)
    with torch.no_grad():
        expected = model(ids).logits
        with invariant(model):
            config = copy.deepcopy(model.config)
            config._attn_implementation = attention
            made = transformers.AutoModelForCausalLM.from_config(config).eval()
            assert model.config._attn_implementation == pretrained.name()
        made.load_state_dict(model.state_dict())
        assert made.config._attn_implementation == attention
        assert torch.equal(made(ids).logits, expected)
