"""Hybrids under invariant(): Gated DeltaNet layers give a token the same bits in any batch, piece and cache."""

import copy

import pytest
import torch
from torch.nn.functional import pad

from rl_kernels.models import audit, invariant

transformers = pytest.importorskip("transformers")
from rl_kernels.models.hybrids.states import DeltaLayer  # noqa: E402

HEADS = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
HEADS |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HEADS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 40}
FAMILIES = {"Qwen3Next": EXPERTS, "Qwen3_5Text": {}, "Qwen3_5MoeText": EXPERTS}
CUTS = ([1] * 5 + [64, 3, 59], [63, 1, 1, 60, 6])
"""Pieces of the longest prompt, across the boundaries of chunks of 64 tokens."""


@pytest.fixture
def hybrid(tiny):
    """Return a maker of hybrids whose decays let a state last for tens of tokens."""

    def make(family="Qwen3_5Text", dtype=torch.float32, device="cpu", **options):
        model = tiny(family, dtype, device, **{**HEADS, **FAMILIES[family], **options})
        for name, value in model.named_parameters():
            if name.endswith("A_log"):
                torch.nn.init.uniform_(value, -6, -2)
        return model

    return make


@pytest.fixture
def prompts():
    """Return token ids of several lengths; the longest has three chunks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 211, (length,), generator=generator) for length in (70, 7, 131, 2, 64)]


def packed(prompts):
    positions = torch.cat([torch.arange(len(ids)) for ids in prompts])[None]
    return {"input_ids": torch.cat(prompts)[None], "position_ids": positions}


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_batch(hybrid, prompts, surroundings, family, dtype, device):
    model = hybrid(family, dtype, device)
    with torch.no_grad():
        plain = model(prompts[0][None].to(device)).logits[0]
    with invariant(model, strict=True) as handle, torch.no_grad():
        computed, alone = list(surroundings(model, prompts, CUTS, device)), {}
        for what, prompt, values in computed:
            assert torch.equal(values, alone.setdefault(prompt, values)), (what, prompt)
        row = {name: value.to(device) for name, value in packed(prompts).items()}
        whole = model(**row, use_cache=False).logits[0]
        assert torch.equal(whole, torch.cat([alone[index] for index in range(len(prompts))]))
        half = {name: value.view(2, -1) for name, value in packed([*prompts, prompts[1][:4]]).items()}
        whole = model(**{name: value.to(device) for name, value in half.items()}).logits.flatten(0, 1)
        assert torch.equal(whole[: len(prompts[0])], alone[0])
    assert f"{family.removesuffix('Text')}GatedDeltaNet" in handle.swapped.values()
    if dtype == torch.float32:
        torch.testing.assert_close(alone[0], plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


def test_tokens_of_the_stock_model_differ(hybrid, prompts, surroundings):
    """The control: without invariant() pieces and batches change logits of many tokens, and audit names the layer."""
    model, counts, alone = hybrid(), torch.zeros(2, dtype=torch.long), {}
    for _, prompt, values in surroundings(model, prompts, CUTS):
        is_other = (values != alone.setdefault(prompt, values)).any(-1)
        counts += torch.tensor([int(is_other.sum()), len(values)])
    print(f"stock: {counts[0]} of {counts[1]} tokens")
    assert 4 * counts[0] > counts[1]
    assert audit(model, prompts[:3]).culprit.module.startswith("model.layers.0")
    with invariant(model, strict=True):
        result = audit(model, prompts[:3])
    assert result.passed
    assert not any("linear_attn" in name for name in result.skipped)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_the_batch_and_are_those_of_the_model(hybrid, prompts, padded, family):
    """Gradients of rows in a padded batch, and of all parameters with more padding, packed and with checkpoints."""
    model, prompts = hybrid(family).train(), prompts[:2]
    upstream = torch.randn(70, 211, generator=torch.Generator().manual_seed(2))

    def gradients(batch, places):
        rows = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        batch = {**batch, "input_ids": None, "inputs_embeds": rows}
        logits = model(**batch, use_cache=False).logits
        model.zero_grad()
        sum((logits[place] * upstream[: len(logits[place])]).sum() for place in places).backward()
        own = [value.grad for value in model.parameters() if value.grad is not None]
        return [rows.grad[place] for place in places], own

    plain = gradients(*padded(prompts, left=False))
    with invariant(model, strict=True):
        rows, whole = gradients(*padded(prompts, left=False))
        for left in (True, False):
            for prompt, row in zip(prompts, rows, strict=True):
                assert torch.equal(gradients(*padded([prompt], left=left, more=9))[0][0], row)
        once, twice = (gradients(*padded(prompts[:1], left=False, more=more))[1] for more in (11, 43))
        assert all(map(torch.equal, once, twice))
        ends = len(prompts[0]), sum(map(len, prompts))
        in_row = gradients(packed(prompts), [(0, slice(ends[0])), (0, slice(*ends))])[0]
        assert all(map(torch.equal, in_row, rows))
        steps = [prompts[0][:48], prompts[0][48:64]]
        in_row = gradients(packed(steps), [(0, slice(48)), (0, slice(48, 64))])[1]
        assert all(map(torch.equal, in_row, gradients(*padded(steps, left=False))[1]))
        for reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert all(map(torch.equal, gradients(*padded(prompts, left=False))[1], whole)), reentrant
    names = [name for name, value in model.named_parameters() if value.grad is not None]
    assert sum(name.endswith(("A_log", "dt_bias", "conv1d.weight")) for name in names) == 3
    for value, other in zip([*rows, *whole], [*plain[0], *plain[1]], strict=True):
        assert (value - other).norm() <= 1e-3 * other.norm() + 1e-6


@pytest.mark.parametrize("way", ["dynamic", "static", "chunks", "beams"])
def test_generate_samples_with_the_logits_of_one_pass(hybrid, prompts, padded, way):
    options = {
        "dynamic": {"do_sample": True, "num_return_sequences": 2},
        "static": {"cache_implementation": "static"},
        "chunks": {"prefill_chunk_size": 50},
        "beams": {"num_beams": 3, "num_return_sequences": 3},
    }[way]
    model, new = hybrid(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]), 6
    batch, _ = padded(prompts[:1] if way == "chunks" else prompts)
    batch.pop("position_ids")
    torch.manual_seed(3)
    with invariant(model, strict=True):
        output = model.generate(
            **batch, max_new_tokens=new, min_new_tokens=new, output_logits=True, return_dict_in_generate=True, **options
        )
        sequences = output.sequences
        copies = len(sequences) // len(batch["input_ids"])
        mask = pad(batch["attention_mask"].repeat_interleave(copies, 0), (0, new), value=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    rows = torch.arange(len(sequences))
    for step, sampled in enumerate(output.logits):
        # Beams are reordered after each step: the logits of step i are those of the beam that it came from.
        source = output.beam_indices[:, step] if way == "beams" else rows
        assert torch.equal(sampled[source], logits[:, -new - 1 + step].float()), step


def test_a_cache_is_forked_cropped_and_reset(hybrid, prompts):
    model, ids = hybrid(), prompts[2]

    @torch.no_grad()
    def run(ids, cache):
        return model(ids, past_key_values=cache, use_cache=True).logits

    with invariant(model, strict=True):
        alone = run(ids[None], None)[0]
        cache = transformers.DynamicCache(config=model.config)
        run(torch.stack((ids[:70], ids[1:71])), cache)
        fork = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([0, 1, 0]))
        more = run(torch.stack((ids[70:80], ids[71:81], ids[70:80])), cache)
        assert torch.equal(more[0], alone[70:80])
        assert torch.equal(more[2], alone[70:80])
        cache = transformers.DynamicCache(config=model.config)
        run(ids[None, :70], cache)
        with pytest.raises(RuntimeError, match="crop: expected activate_past_recording"):
            cache.crop(-1)
        cache.activate_past_recording()
        run(ids[None, 5:14], cache)
        cache.crop(-9)
        assert torch.equal(run(ids[None, 70:], cache)[0], alone[70:])
        with pytest.raises(
            ValueError, match=r"lengths: expected .128. to .131., the tokens that the cache can go back"
        ):
            cache.crop(-4)
        assert torch.equal(run(torch.stack((ids[70:72], ids[71:73])), fork)[0], alone[70:72])
        static = transformers.StaticCache(config=model.config, max_cache_len=140)
        for _ in range(2):
            assert torch.equal(torch.cat([run(part[None], static)[0] for part in ids.split(66)]), alone)
            static.reset()


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(70, 2), (66, 1)], ids=str)
def test_crop_of_recorded_tokens_in_a_padded_batch(hybrid, prompts, padded, lengths):
    """Rows so short that the convolution reads padding once more after the crop; recording begins before all tokens."""
    model, ids = hybrid(), prompts[2]
    rows = [ids[: lengths[0]], ids[7 : 7 + lengths[1]]]
    batch, _ = padded(rows)
    more = torch.ones(2, 4, dtype=torch.long)
    with invariant(model, strict=True):
        cache = transformers.DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(**batch, past_key_values=cache)
        cache.crop(-1)
        seen = torch.cat((batch["attention_mask"][:, :-1], more), 1)
        positions = torch.tensor([[n - 1] for n in lengths]) + torch.arange(4)
        new = torch.stack((ids[:4], ids[4:8]))
        logits = model(new, attention_mask=seen, position_ids=positions, past_key_values=cache).logits
        for row, tokens, values in zip(rows, new, logits, strict=True):
            alone = model(torch.cat((row[:-1], tokens))[None], use_cache=False).logits[0, -4:]
            assert torch.equal(values, alone)


@torch.no_grad()
def test_a_cache_after_reset_takes_another_batch_and_dtype(hybrid):
    model = hybrid()
    net = model.model.layers[0].linear_attn
    with invariant(model, strict=True):
        cache, rows = transformers.DynamicCache(config=model.config), torch.randn(2, 5, 32)
        for batch, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.bfloat16)):
            net.to(dtype)
            x = rows[:batch].to(dtype)
            parts = [net(x[:, :3], cache_params=cache), net(x[:, 3:], cache_params=cache)]
            assert torch.equal(torch.cat(parts, 1), net(x))
            cache.layers[0].reset()


def test_audit_crosses_a_chunk_by_default(hybrid, monkeypatch):
    """A state that is lost after 64 tokens."""
    attend = DeltaLayer.attend

    def forgetful(self, *args):
        out = attend(self, *args)
        self.delta.state[self.delta.lengths >= 64] = 0
        return out

    model = hybrid()
    with invariant(model, strict=True):
        monkeypatch.setattr(DeltaLayer, "attend", forgetful)
        assert not audit(model).passed
        assert audit(model, length=23).passed


def test_packed_rows_of_a_model_of_images_and_text(hybrid, prompts):
    """Its forward takes use_cache among other arguments, by no name of its own."""
    text = hybrid().config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with pytest.warns(UserWarning, match=r"patch_embed\.proj"):
        handle = invariant(model)
    with handle, torch.no_grad():
        whole = model(**packed(prompts[:2])).logits[0]
        assert torch.equal(whole, torch.cat([model(ids[None]).logits[0] for ids in prompts[:2]]))


class PlainGatedNorm(torch.nn.Module):
    """A gated norm that has no weight."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, hidden_states, gate=None):
        x = torch.nn.functional.rms_norm(hidden_states.float(), hidden_states.shape[-1:], eps=self.eps)
        return (x * torch.nn.functional.silu(gate.float())).to(hidden_states.dtype)


def test_a_gated_norm_without_a_weight():
    model = torch.nn.ModuleDict({"norm": PlainGatedNorm()})
    x, gate = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    plain = model["norm"](x, gate)
    with invariant(model, strict=True) as handle:
        assert handle.swapped == {"norm": "PlainGatedNorm"}
        torch.testing.assert_close(model["norm"](x, gate), plain)


def test_caches_that_do_not_fit(hybrid, prompts):
    model, ids = hybrid(), prompts[0][None]
    with torch.no_grad():
        stock = model(ids[:, :5], use_cache=True).past_key_values
    with invariant(model, strict=True):
        with pytest.raises(
            ValueError, match=r"past_key_values: expected a cache that the model itself filled .*its layer 0"
        ):
            model(ids[:, 5:], past_key_values=stock)
        with pytest.raises(ValueError, match=r"a cache made with the model's config, .* its layer 0 is missing"):
            model(ids, past_key_values=transformers.DynamicCache())
        # With gradients a first pass fills the cache, a second one raises.
        output = model(ids[:, :9], use_cache=True)
        output.logits.sum().backward()
        with pytest.raises(ValueError, match="past_key_values: expected none, or an empty one, where gradients"):
            model(ids[:, 9:], past_key_values=output.past_key_values)
        with torch.no_grad():
            rest = model(ids[:, 9:], past_key_values=output.past_key_values).logits
            whole = model(ids).logits
            assert torch.equal(torch.cat((output.logits, rest), 1), whole)
            with pytest.raises(ValueError, match=r"expected a cache of 2 sequences in torch\.float32, got one of 1"):
                model(ids.expand(2, -1), past_key_values=output.past_key_values)
            mask = torch.tensor([[0], [1]])
            with pytest.raises(ValueError, match="attention_mask: expected no padding among tokens that come one at a"):
                model(ids[:, :1].expand(2, -1), attention_mask=mask)
            bounds = torch.tensor([0, 30, 70], dtype=torch.int32)
            options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "past_key_values": output.past_key_values}
            with pytest.raises(ValueError, match="use_cache: expected False with packed sequences"):
                model(ids, **options, max_length_q=40, max_length_k=40)
            with pytest.raises(ValueError, match="seq_idx: expected packed sequences by position_ids"):
                model(ids, seq_idx=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="past_key_values: expected a new cache, this one was made under"):
        model(ids[:, :3], past_key_values=output.past_key_values)


REFUSED = {
    "taps": ({"linear_conv_kernel_dim": 3}, "expected linear_conv_kernel_dim 4, got 3"),
    "activation": ({"hidden_act": "gelu"}, "expected the hidden_act silu, got gelu"),
    "size": ({"linear_key_head_dim": 24}, r"expected a head_k_dim of \(16, 32, 64, 128, 256\), got 24"),
    "convolution": ({}, "expected an nn.Conv1d as conv1d, whose weight the layer reads, got a Identity"),
    "dtype": ({}, "the weight of its convolution is torch.float64, expected FP32, BF16 or FP16"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_are_refused(hybrid, what):
    options, reason = REFUSED[what]
    model = hybrid(**options)
    if what == "dtype":
        model.model.layers[0].linear_attn.conv1d.double()
    left = "model.layers.0.linear_attn.conv1d"
    if what == "convolution":
        model.model.layers[0].linear_attn.conv1d = torch.nn.Identity()
        left = "model.layers.0.linear_attn"
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.linear_attn \(Qwen3_5GatedDeltaNet: {reason}"):
        invariant(model, strict=True)
    with pytest.warns(UserWarning, match=reason), invariant(model) as handle:
        assert left in handle.left


def test_adapters_and_copies(hybrid, prompts, surroundings):
    peft = pytest.importorskip("peft")
    model, ids = hybrid(), prompts[0][None]
    plain = model(ids).logits
    targets = ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    with invariant(adapter, strict=True):
        twin, alone = copy.deepcopy(adapter), {}
        for what, prompt, values in surroundings(adapter, prompts, CUTS[:1]):
            assert torch.equal(values, alone.setdefault(prompt, values)), (what, prompt)
        adapter(ids).logits.sum().backward()
        assert torch.equal(twin(ids).logits[0], alone[0])
    assert all(value.grad is not None for value in adapter.parameters() if value.requires_grad)
    adapter.unload()
    assert torch.equal(model(ids).logits, plain)
    with (
        invariant(model, strict=True),
        pytest.raises(ValueError, match=r"linear_attn\.conv1d"),
        pytest.warns(UserWarning, match="groups > 1"),
    ):
        peft.get_peft_model(model, peft.LoraConfig(r=128, target_modules=["conv1d"]))


@torch.no_grad()
def test_weights_that_accelerate_offloads(hybrid, prompts):
    """The layer reads the weight of its convolution, whose hook would load it in a call."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = hybrid(), prompts[0][None]
    with invariant(model, strict=True):
        expected = model(ids).logits
    accelerate.cpu_offload(model, "cpu")
    assert model.model.layers[0].linear_attn.conv1d.weight.is_meta
    with invariant(model, strict=True):
        assert torch.equal(model(ids).logits, expected)


def test_under_torch_compile(hybrid, prompts):
    """The whole model in one graph, its backward pass, and decoding with a static cache."""
    model, ids = hybrid().train(), torch.stack((prompts[0], prompts[2][:70]))

    def gradients(run):
        model.zero_grad()
        run(ids, use_cache=False).logits.square().sum().backward()
        return [value.grad.clone() for value in model.parameters() if value.grad is not None]

    with invariant(model, strict=True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert all(map(torch.equal, gradients(compiled), gradients(model)))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            cache = transformers.StaticCache(config=model.config, max_cache_len=70)
            parts = [model(ids[:, :66], past_key_values=cache).logits]
            for place in range(66, 69):
                positions = torch.full((2, 1), place)
                token = ids[:, place : place + 1]
                parts.append(compiled(token, position_ids=positions, past_key_values=cache, use_cache=True).logits)
            assert torch.equal(torch.cat(parts, 1), model(ids[:, :69], use_cache=False).logits)
