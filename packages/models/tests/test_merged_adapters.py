"""LoRA layers that compute with merged weights: values, gradients, and adapters without a merged weight."""

import copy

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from rl_kernels.det_gemm import det_linear  # noqa: E402
from rl_kernels.models import MasterWeights, invariant  # noqa: E402
from rl_kernels.models.merged_adapters import check_adapters, lora_layers, merge_adapters, merged_weight  # noqa: E402

BF16 = torch.bfloat16
LINEAR = {"r": 3, "lora_alpha": 6, "target_modules": ["one", "two"], "init_lora_weights": False}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 19}


class Small(nn.Module):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(7, 24), nn.Linear(24, 40), nn.Linear(40, 8, bias=False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def adapted(dtype=BF16, **options):
    """Return a model with drawn adapters in FP32, and its layer ``one``."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Small().to(dtype), peft.LoraConfig(**LINEAR | options))
    return model, model.base_model.model.one


def rows_of(count, width, dtype=BF16, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def definition(layer, dtype=torch.float64):
    """Return ``W + s B A`` before it is rounded."""
    a, b = (getattr(layer, name)["default"].weight.to(dtype) for name in ("lora_A", "lora_B"))
    return layer.base_layer.weight.to(dtype) + layer.scaling["default"] * (b @ a)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_output_is_that_of_the_rounded_sum(dtype):
    model, layer = adapted(dtype)
    stock = layer(rows_of(5, 24, dtype))
    merge_adapters(model)
    merged = merged_weight(layer, "default")
    nearest = definition(layer).to(dtype)
    assert float((merged != nearest).double().mean()) < (1e-2 if dtype != torch.float32 else 0.5)
    torch.testing.assert_close(merged, nearest)
    x = rows_of(5, 24, dtype)
    assert torch.equal(layer(x), det_linear(x, merged, layer.base_layer.bias))
    assert not torch.equal(layer(x), stock)
    with model.disable_adapter():
        assert torch.equal(layer(x), layer.base_layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gradients_are_those_of_the_merged_formula(dtype):
    model, layer = adapted(dtype)
    merge_adapters(model)
    x, grad = rows_of(33, 24, dtype).view(3, 11, 24).requires_grad_(), rows_of(33, 40, dtype, 2).view(3, 11, 40)
    layer(x).backward(grad)
    rows, grads = (each.detach().double().flatten(0, 1) for each in (x, grad))
    a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    product = grads.t() @ rows
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(a.grad.double(), 2 * b.detach().double().t() @ product, **near)
    torch.testing.assert_close(b.grad.double(), 2 * product @ a.detach().double().t(), **near)
    expected = (grads @ merged_weight(layer, "default").double()).view(x.shape)
    torch.testing.assert_close(x.grad.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert layer.base_layer.weight.grad is None


def test_gradients_in_fp64_of_a_whole_model():
    """Of FP32 weights, whose rounding is far below the tolerance."""
    model, _ = adapted(torch.float32)
    exact = copy.deepcopy(model).double()
    merge_adapters(model)
    x = rows_of(9, 24, torch.float32)
    for each, rows in ((model, x), (exact, x.double())):
        each(rows).square().mean().backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert len(found) == 4
    for name, value in exact.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(found[name].double(), value.grad, rtol=1e-5, atol=1e-8)


def test_gradients_of_adapters_that_are_cast_are_fp32():
    model, layer = adapted(torch.float32)
    MasterWeights(model.base_model.model)
    merge_adapters(model)
    layer(rows_of(33, 24)).backward(rows_of(33, 40))
    a = layer.lora_A["default"].weight
    assert (a.dtype, a.grad.dtype) == (BF16, torch.float32)
    assert not torch.equal(a.grad, a.grad.to(BF16).float())


def test_merge_of_peft_hands_out_the_same_weights_and_leaves_the_base_as_it_was():
    model, layer = adapted()
    base, x = layer.base_layer.weight.detach().clone(), rows_of(5, 24)
    merge_adapters(model)
    expected, merged = layer(x), merged_weight(layer, "default").clone()
    for _ in range(2):
        model.merge_adapter()
        assert torch.equal(layer.base_layer.weight, merged)
        assert torch.equal(det_linear(x, layer.base_layer.weight, layer.base_layer.bias), expected)
        model.merge_adapter()
        model.unmerge_adapter()
        model.unmerge_adapter()
        assert torch.equal(layer.base_layer.weight, base)
        assert torch.equal(layer(x), expected)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(layer(x), det_linear(x, base, layer.base_layer.bias))
    alone = model.merge_and_unload()
    assert torch.equal(alone.one.weight, merged)


class Unmarked(torch.optim.Optimizer):
    """An optimizer whose kernel PyTorch does not see."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for value in self.param_groups[0]["params"]:
            value.data.add_(value.grad.sign(), alpha=-0.1)


@pytest.mark.parametrize("of", [lambda params: torch.optim.AdamW(params, lr=0.1), Unmarked])
def test_the_copy_follows_the_adapter_in_place(of):
    model, layer = adapted()
    merge_adapters(model)
    optimizer = of([value for value in model.parameters() if value.requires_grad])
    merged = merged_weight(layer, "default")
    before = merged.clone()
    for _ in range(2):
        model(rows_of(6, 24)).float().square().mean().backward()
        optimizer.step()
        again = merged_weight(layer, "default")
        assert again is merged
        assert not torch.equal(again, before)
        torch.testing.assert_close(again, definition(layer).to(BF16))
        before = again.clone()
    with torch.no_grad():
        layer.lora_B["default"].weight.zero_()
    assert torch.equal(merged_weight(layer, "default"), layer.base_layer.weight)
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(merged_weight(layer, "default"), torch.full_like(merged, 1 + 2 * 3))


def test_a_copy_of_the_model_has_its_own_weights():
    model, layer = adapted()
    merge_adapters(model)
    expected = layer(rows_of(5, 24))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.base_model.model.one.lora_B["default"].weight.mul_(2)
    assert not torch.equal(other.base_model.model.one(rows_of(5, 24)), expected)
    assert torch.equal(layer(rows_of(5, 24)), expected)
    assert model.state_dict().keys() == adapted()[0].state_dict().keys()


def test_a_second_adapter_has_a_copy_of_its_own():
    model, layer = adapted()
    merge_adapters(model)
    first = layer(rows_of(5, 24))
    model.add_adapter("ref", peft.LoraConfig(**LINEAR))
    model.set_adapter("ref")
    assert not torch.equal(layer(rows_of(5, 24)), first)
    model.set_adapter("default")
    assert torch.equal(layer(rows_of(5, 24)), first)
    model.base_model.set_adapter(["default", "ref"])
    with pytest.raises(ValueError, match=r"^adapters: expected one active adapter, got 2"):
        layer(rows_of(5, 24))
    with pytest.raises(ValueError, match=r"one has 2 active adapters"):
        check_adapters(model)


def test_rows_do_not_depend_on_the_batch_and_checkpoints_change_no_gradient():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(BF16)
    options = {**LINEAR, "target_modules": "all-linear", "exclude_modules": ["lm_head"]}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    model.enable_input_require_grads()
    ids, grads = torch.arange(12).view(3, 4) + 1, []
    with invariant(model, strict=True):
        check_adapters(model)
        merge_adapters(model)
        assert len(lora_layers(model)) == 14
        whole = model(ids).logits
        assert all(torch.equal(model(row[None]).logits[0], own) for row, own in zip(ids, whole, strict=True))
        for checkpoints in (False, True):
            if checkpoints:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            model.train()
            model(ids).logits.float().square().mean().backward()
            grads.append([value.grad for value in model.parameters() if value.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


REFUSED = {
    "variant: DoraLinear": peft.LoraConfig(**LINEAR, use_dora=True),
    "lora_bias": peft.LoraConfig(**LINEAR | {"target_modules": ["one"]}, lora_bias=True),
    "lora_dropout 0.1": peft.LoraConfig(**LINEAR, lora_dropout=0.1),
    "Embedding": peft.LoraConfig(**LINEAR | {"target_modules": ["table"]}),
    "IA3|ia3": peft.IA3Config(target_modules=["one"], feedforward_modules=[]),
    "trainable_token_indices: expected none": peft.LoraConfig(**LINEAR, trainable_token_indices={"table": [1, 2]}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_adapters_without_a_merged_weight_are_refused(reason):
    model = peft.get_peft_model(Small(), REFUSED[reason])
    with pytest.raises(ValueError, match=f"^(peft_config: expected plain LoRA of nn.Linear layers, .*)?({reason})"):
        check_adapters(model)


def test_models_without_layers_or_with_merged_ones_are_refused():
    with pytest.raises(ValueError, match=r"^peft_config: expected LoRA layers, the model has none"):
        check_adapters(Small())
    model, _ = adapted()
    check_adapters(model)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"one is merged; call unmerge_adapter"):
        check_adapters(model)


def test_adapters_that_are_added_later_are_checked_too():
    model, layer = adapted()
    merge_adapters(model)
    model.add_adapter("other", peft.LoraConfig(**LINEAR, lora_dropout=0.1))
    model.set_adapter("other")
    with pytest.raises(ValueError, match=r"^peft_config: expected plain LoRA, has lora_dropout 0.1"):
        layer(rows_of(5, 24))
