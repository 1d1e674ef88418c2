"""Mixtures of experts under invariant(): logits, gradients and chosen experts depend on no other token, bit for bit."""

import copy
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.models import invariant

transformers = pytest.importorskip("transformers")
FAMILIES = ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss", "Glm4Moe", "DeepseekV3", "GraniteMoe", "Phimoe"]
CUTS = (1, 5, [16, 5, *[1] * 7, 5])
DTYPES = [torch.float32, torch.bfloat16]
MORE = ["DeepseekV2", "Glm4MoeLite", "GraniteMoeShared", "Cohere2Moe", "FlexOlmo"]
CASES = [(family, dtype) for dtype in DTYPES for family in FAMILIES] + [(family, torch.float32) for family in MORE]


class Choosing:
    """A model whose logits ``[B, T, V]`` end with the chosen experts of each layer, sorted by id."""

    def __init__(self, model):
        self.model, self.chosen = model, []
        for module in model.modules():
            if "router" in type(module).__name__.lower():
                module.register_forward_hook(self.keep)

    def keep(self, module, args, results):
        self.chosen += [x.sort(-1).values for x in results if not x.is_floating_point()]

    def __call__(self, **inputs):
        self.chosen.clear()
        output = self.model(**inputs)
        shape = output.logits.shape[:2]
        parts = (output.logits.double(), *(ids.unflatten(0, shape).double() for ids in self.chosen))
        return SimpleNamespace(logits=torch.cat(parts, -1), past_key_values=output.past_key_values)


def differing(computed):
    """Count the tokens whose logits, and whose experts, differ from those alone, and all tokens compared."""
    alone, counts = {}, torch.zeros(3, dtype=torch.long)
    for what, prompt, values in computed:
        is_other = values != alone.setdefault(prompt, values)
        if what != "alone":
            parts = is_other[:, :211], is_other[:, 211:]
            counts += torch.tensor([*(int(part.any(1).sum()) for part in parts), len(values)])
    return counts.tolist()


@pytest.mark.smoke
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_logits_and_experts_do_not_depend_on_the_batch(tiny, prompts, surroundings, family, dtype, device):
    model = tiny(family, dtype, device)
    with torch.no_grad():
        plain = model(prompts[0][None].to(device)).logits[0]
    with invariant(model, strict=True) as handle:
        computed = list(surroundings(Choosing(model), prompts, CUTS, device))
    assert differing(computed) == [0, 0, differing(computed)[2]]
    assert sum(name.endswith("Experts") for name in handle.swapped.values()) >= 1
    assert sum("router" in name.lower() for name in handle.swapped.values()) >= 1
    if dtype == torch.float32:
        close = computed[0][2][:, :211].float()
        torch.testing.assert_close(close, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_the_batch_and_are_those_of_the_model(tiny, prompts, padded, family, device):
    """Gradients of rows in a padded batch, and of all parameters with more padding and with checkpoints."""
    model = tiny(family, device=device).train(family != "Phimoe")

    def gradients(prompts, more=0):
        batch, places = padded(prompts, left=False, more=more)
        batch = {name: value.to(device) for name, value in batch.items()}
        rows = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        logits = model(inputs_embeds=rows, **batch, use_cache=False).logits
        total = sum((logits[place] * upstream[: len(logits[place])]).sum() for place in places)
        model.zero_grad()
        total.backward()
        own = [value.grad for value in model.parameters() if value.grad is not None]
        return [rows.grad[place] for place in places], own

    upstream = torch.randn(40, 211, generator=torch.Generator().manual_seed(2)).to(device)
    plain = gradients(prompts)
    with invariant(model, strict=True):
        rows, whole = gradients(prompts)
        for prompt, row in zip(prompts, rows, strict=True):
            assert torch.equal(gradients([prompt])[0][0], row)
        (_, padded_once), (_, padded_twice) = (gradients(prompts[2:3], more) for more in (15, 31))
        assert all(map(torch.equal, padded_once, padded_twice))
        for reentrant in (True, False) if model.training else ():
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert all(map(torch.equal, gradients(prompts)[1], whole)), reentrant
    for value, other in zip([*rows, *whole], [*plain[0], *plain[1]], strict=True):
        assert (value - other).norm() <= 1e-4 * other.norm() + 1e-6


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_auxiliary_losses_are_those_of_the_model(tiny, prompts, family):
    model, ids = tiny(family).train(), prompts[2][None]

    def losses():
        output = model(ids, labels=ids, output_router_logits=True, use_cache=False)
        return output.aux_loss, *torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)

    plain = losses()
    with invariant(model, strict=True):
        computed, logits = losses(), model(ids, output_router_logits=True).router_logits
        alone = model(ids[:, :7], output_router_logits=True).router_logits
    assert all(torch.equal(part, whole[:7]) for part, whole in zip(alone, logits, strict=True))
    for value, other in zip(computed, plain, strict=True):
        assert (value - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_tokens_of_the_stock_model_choose_other_experts(tiny, prompts, surroundings):
    """The control: without invariant() the batch changes choices."""
    model = tiny("Qwen3Moe", torch.bfloat16, num_hidden_layers=4, hidden_size=128, num_experts=64)
    logits, experts, compared = differing(surroundings(Choosing(model), prompts, CUTS))
    print(f"stock: {logits} and {experts} of {compared} tokens")
    assert 0 < experts <= logits < compared


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gate"]},
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_parameters": ["mlp.gate.weight"]},
    ],
    ids=["attention", "experts", "router"],
)
def test_adapters(tiny, prompts, surroundings, targets):
    peft = pytest.importorskip("peft")
    model = tiny("Qwen3Moe")
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **targets))
    ids = prompts[2][None]
    plain = adapter(ids).logits
    with invariant(adapter, strict=True):
        computed = list(surroundings(Choosing(adapter), prompts, CUTS))
        adapter(ids).logits.sum().backward()
    assert differing(computed)[:2] == [0, 0]
    assert all(value.grad is not None for value in adapter.parameters() if value.requires_grad)
    torch.testing.assert_close(adapter(ids).logits, plain, rtol=0, atol=0)


def quantized(model):
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)


def without_interface(model):
    for module in model.modules():
        vars(module).pop("has_gate", None)


def with_another_router(model):
    def forward(self, hidden_states):
        logits, weights, ids = kind.forward(self, hidden_states)
        return logits, weights.square(), ids

    routers = [module for module in model.modules() if "Router" in type(module).__name__]
    kind = type(routers[0])
    for module in routers:
        module.__class__ = type("SquaringRouter", (kind,), {"forward": forward})


def without_gates(model):
    for module in model.modules():
        if hasattr(module, "has_gate"):
            module.has_gate = False


REFUSED = {
    "quantized": (quantized, {}, "Qwen3MoeExperts: its weights are torch.float32, torch.float8_e4m3fn"),
    "no interface": (without_interface, {}, "Qwen3MoeExperts: its weights are quantized, or it does not go through"),
    "activation": (lambda model: None, {"hidden_act": "relu"}, "Qwen3MoeExperts: its activation is none of silu"),
    "no gate": (without_gates, {}, "Qwen3MoeExperts: its experts have no gate"),
    "router": (with_another_router, {}, "SquaringRouter is an unknown kind of router"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_mixtures_that_are_refused(tiny, prompts, what):
    change, options, reason = REFUSED[what]
    model = tiny("Qwen3Moe", **options)
    change(model)
    with pytest.raises(ValueError, match=f"left alone, and may depend on the batch: model.layers.0.mlp.*{reason}"):
        invariant(model, strict=True)
    with pytest.warns(UserWarning, match=reason):
        handle = invariant(model)
    with handle:
        kinds = {name.rpartition(".")[2] for name in handle.left}
        # Experts that are left alone get their ids from their own router.
        assert kinds == ({"gate"} if what == "router" else {"gate", "experts"})
        if what == "activation":
            model(prompts[0][None])


@pytest.mark.parametrize(("family", "called"), [("Afmoe", "sigmoid"), ("Laguna", "softplus")])
def test_families_whose_attention_has_a_gate_of_its_own_are_refused_on_a_cpu(tiny, family, called):
    """PyTorch rounds the last elements of a tensor differently there."""
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip("this transformers does not have it")
    model, reason = tiny(family), rf"layers.0.self_attn \(its forward calls {called}"
    with pytest.raises(ValueError, match=reason):
        invariant(model, strict=True)
    with pytest.warns(UserWarning, match=reason):
        invariant(model).undo()


def test_an_installed_transformers_without_the_interface_is_named(tiny, monkeypatch):
    model = tiny("Qwen3Moe")
    without_interface(model)
    monkeypatch.delattr("transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS")
    with pytest.raises(ValueError, match=r"needs a transformers with ALL_EXPERTS_FUNCTIONS.*has no experts interface"):
        invariant(model, strict=True)


def test_noise_in_training_is_refused(tiny, prompts):
    noisy, options = {"Mixtral": "jitter_noise", "Phimoe": "at random"}, {"Mixtral": {"router_jitter_noise": 0.1}}
    for family, message in noisy.items():
        model = tiny(family, **options.get(family, {})).train()
        with invariant(model, strict=True):
            with pytest.raises(ValueError, match=message):
                model(prompts[0][None])
            model.eval()(prompts[0][None])


def test_copies_and_undo(tiny, prompts):
    for family in ("Qwen3Moe", "Qwen2Moe", "Phimoe"):
        model, ids = tiny(family), prompts[0][None]
        plain, before = model(ids).logits, [type(module) for module in model.modules()]
        with invariant(model, strict=True):
            expected, twin = model(ids).logits, copy.deepcopy(model)
        assert torch.equal(twin(ids).logits, expected)
        invariant(twin).undo()
        for each in (twin, model):
            assert [type(module) for module in each.modules()] == before
            assert torch.equal(each(ids).logits, plain)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_recorded_routes_are_replayed_and_differences_counted(tiny, prompts, padded, family):
    """Routes of other weights, in a padded batch and packed: as many differ as the two models' own choices."""
    model, other = tiny(family).train(), tiny(family)
    with torch.no_grad():
        for name, value in other.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                value += 0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3))
    layers = sum(
        "Router" in type(module).__name__ or "TopkRouter" in type(module).__name__ for module in model.modules()
    )

    def chosen(model, ids):
        watched = Choosing(model)
        output = watched(input_ids=ids[None], use_cache=False).logits[0, :, 211:]
        return output.unflatten(-1, (layers, -1)).long()

    with invariant(model), invariant(other), torch.no_grad():
        routes = [chosen(other, ids) for ids in prompts]
        plain = [model(ids[None]).logits[0] for ids in prompts]
    with invariant(model, strict=True, routes=routes[:1]) as handle:
        alone = []
        for ids, each in zip(prompts, routes, strict=True):
            handle.replay([each])
            assert torch.equal(chosen(model, ids), each)
            alone.append(model(ids[None]).logits[0])
        others, tokens = handle.rerouted
        assert 0 < others < tokens == 2 * sum(map(len, prompts))
        batch, places = padded(prompts)
        handle.replay(routes)
        logits = model(**batch, use_cache=False).logits
        assert all(torch.equal(logits[place], each) for place, each in zip(places, alone, strict=True))
        row = {
            "input_ids": torch.cat(prompts)[None],
            "position_ids": torch.cat([torch.arange(len(x)) for x in prompts])[None],
        }
        assert torch.equal(model(**row).logits[0], torch.cat(alone))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        before = handle.rerouted
        model(**row).logits.sum().backward()
        assert handle.rerouted[0] - before[0] == others // 2
        # A token without a recorded route goes where the model sends it.
        handle.replay([each.index_fill(0, torch.tensor([len(each) - 1]), -1) for each in routes])
        assert handle.rerouted[1] == before[1] + sum(map(len, prompts))
        model(**row)
        assert handle.rerouted[1] == before[1] + 2 * sum(map(len, prompts)) - len(prompts)
        with pytest.raises(ValueError, match=r"routes: expected those of the 19 tokens of the pass, got 77"):
            model(prompts[0][None])
        handle.replay(None)
        assert torch.equal(model(prompts[0][None]).logits[0], plain[0])
    assert not any("_rl_kernels_replay" in vars(module) for module in model.modules())


def test_routes_that_cannot_be_replayed(tiny):
    routes = [torch.zeros(5, 2, 3, dtype=torch.long)]
    for family, message in {"Llama": "a model without routers", "Phimoe": "a RowWisePhimoeTopKRouter"}.items():
        model = tiny(family)
        with pytest.raises(ValueError, match=f"routes: cannot be replayed in {message}"):
            invariant(model, routes=routes)
        assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="tokens, layers with experts, experts of a token"):
        invariant(tiny("Qwen3Moe", num_hidden_layers=3), routes=routes)
    with invariant(tiny("Qwen3Moe")) as handle, pytest.raises(ValueError, match="routes: expected a handle of"):
        handle.replay(routes)
