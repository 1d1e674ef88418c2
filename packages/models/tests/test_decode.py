"""One token of each sequence through the layers of a decoder as a row of launches: the bits of the layers' modules."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rl_kernels.models import decode, invariant

FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 3},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Olmo2": {},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh"},
}
OTHERS = ("Olmo2", "Gemma")
"""Families whose layers have another form, or another MLP."""


@pytest.fixture
def steps(monkeypatch, triton_on):
    """Count the layers that a step ran; ``steps.clear()`` and ``sum(steps)``."""
    taken, step = [], decode._step

    def counted(*args):
        found = step(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(decode, "_step", counted)
    return taken


def decoded(model, **options):
    """Return the logits of a padded batch, token by token."""
    ids = torch.arange(3, 9, device=model.device).view(2, 3)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, **options}
    # On a GPU generate compiles the pass of a static cache, which has no steps.
    options["disable_compile"] = True
    found = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(found.logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_bits_of_the_modules(tiny, triton_on, triton_dtype, steps, monkeypatch, family, cache):
    model = tiny(family, triton_dtype, triton_on, **FAMILIES[family])
    with invariant(model, strict=True):
        found = decoded(model, cache_implementation=cache)
        # Two tokens after the prefill, in two layers.
        assert sum(steps) == (0 if family in OTHERS else 4)
        monkeypatch.setattr(decode, "_step", lambda *_: None)
        assert torch.equal(found, decoded(model, cache_implementation=cache))


def new_layer(model):
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)


def replaced_forward(model):
    part = model.model.layers[0].self_attn
    part.forward = lambda *args, **options: type(part).forward(part, *args, **options)


def plain_attribute(name):
    def change(model):
        part = model.model.layers[0].self_attn.q_proj
        value = part._parameters.pop(name)
        setattr(part, name, value.data)

    return change


CHANGES = {
    "hook": lambda model: model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *_: None),
    "hook before": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: None),
    "forward": replaced_forward,
    "module": new_layer,
    "compiled call": lambda model: model.model.layers[0].self_attn.k_proj.compile(backend="eager"),
    "plain weight": plain_attribute("weight"),
    "plain bias": plain_attribute("bias"),
    "training": lambda model: model.model.layers[0].train(),
    "parametrization": lambda model: nn.utils.parametrize.register_parametrization(
        model.model.layers[0].mlp.gate_proj, "weight", nn.Identity()
    ),
}
"""What a step leaves to the modules, done to the first of two layers."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_change_a_module_is_left_to_it(tiny, triton_on, steps, change):
    model = tiny("Qwen2", device=triton_on)
    with invariant(model, strict=True):
        before = decoded(model)
        assert sum(steps) == 4
        steps.clear()
        CHANGES[change](model)
        assert torch.equal(decoded(model), before)
        assert steps.count(True) == 2


def test_forwards_of_others_run(tiny, triton_on, steps, monkeypatch):
    """Of a class of someone's own, which may change its mind, and of transformers' class, replaced after the swap."""
    model = tiny(device=triton_on)
    layer, attention = type(model.model.layers[0]), type(model.model.layers[0].self_attn)

    class Steered(layer):
        by = 0.0

        def forward(self, *args, **options):
            return super().forward(*args, **options) + self.by

    with invariant(model, strict=True):
        before = decoded(model)
        for kind in (layer, attention):
            with monkeypatch.context() as patch:
                original = kind.forward
                patch.setattr(kind, "forward", lambda *args, run=original, **options: run(*args, **options))
                steps.clear()
                assert torch.equal(decoded(model), before)
                assert not any(steps)
    for each in model.model.layers:
        each.__class__ = Steered
    with invariant(model, strict=True):
        assert torch.equal(decoded(model), before)
        monkeypatch.setattr(Steered, "by", 1.0)
        assert not torch.equal(decoded(model)[1:], before[1:])
    assert not any(steps)


def test_norms_without_an_epsilon(tiny, triton_on, steps):
    """PyTorch's norms take that of the dtype."""
    model = tiny(device=triton_on)
    for layer in model.model.layers:
        layer.input_layernorm = nn.RMSNorm(32, device=triton_on)
    with invariant(model, strict=True):
        assert torch.isfinite(decoded(model)).all()
    assert not any(steps)


def test_rows_at_odd_addresses(tiny, triton_on, steps):
    """Norms copy them first."""
    model = tiny(device=triton_on)

    def move(_, args):
        x = args[0]
        return (x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x), *args[1:])

    with invariant(model, strict=True):
        before = decoded(model)
        steps.clear()
        model.model.layers[0].register_forward_pre_hook(move)
        assert torch.equal(decoded(model), before)
    assert steps.count(True) == 2


def test_masks_are_not_kept(tiny, triton_on, steps, monkeypatch):
    model, masks, means = tiny(device=triton_on), [], decode.mask_arguments
    monkeypatch.setattr(
        decode, "mask_arguments", lambda mask, *rest: masks.append(weakref.ref(mask)) or means(mask, *rest)
    )
    forward = decode._attend
    monkeypatch.setattr(
        decode, "_attend", lambda *args: masks.append(weakref.ref(args[-1]["attention_mask"])) or forward(*args)
    )
    with invariant(model, strict=True):
        decoded(model)
    gc.collect()
    assert len(masks) == 4 + 2
    assert not any(mask() is not None for mask in masks)


@pytest.mark.parametrize("is_first", [True, False])
def test_sharded_before_or_after_the_swap_and_undone(tiny, triton_on, steps, one_process, is_first):
    model, mesh = tiny(device=triton_on), init_device_mesh(triton_on.type, (1,))
    plain = decoded(model)

    def shard():
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)

    with invariant(model, strict=True):
        expected = decoded(model)
        assert sum(steps) == 4
    if is_first:
        shard()
    with invariant(model, strict=True):
        if not is_first:
            shard()
        assert torch.equal(decoded(model), expected)
        assert sum(steps) == 8
    assert torch.equal(decoded(model), plain)
    assert sum(steps) == 8


def test_weights_are_those_of_the_call(tiny, triton_on, steps, monkeypatch):
    """Updates in place, and other memory under the same parameter."""
    model = tiny(device=triton_on)
    with invariant(model, strict=True):
        before = decoded(model)
        model.model.layers[1].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone()
        model.model.layers[0].self_attn.q_proj.weight.data.mul_(-1)
        after = decoded(model)
        assert sum(steps) == 8
        assert not torch.equal(before, after)
        monkeypatch.setattr(decode, "_step", lambda *_: None)
        assert torch.equal(after, decoded(model))


def test_a_step_ends_with_the_swap_and_where_someone_observes(tiny, triton_on, steps):
    model = tiny(device=triton_on)
    name = type(model.model.layers[0]).__name__
    with invariant(model, strict=True):
        # Plans of sharding look classes up by this name.
        assert type(model.model.layers[0]).__name__ == name
        with torch.autocast(triton_on.type, torch.bfloat16):
            decoded(model)
        with torch.profiler.profile(acc_events=True):
            decoded(model)
        assert not any(steps)
    decoded(model)
    assert not any(steps)
