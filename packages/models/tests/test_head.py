"""head_logp(): the logits of a model's own head, whatever it is made of."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear
from rl_kernels.linear_logp import linear_logp
from rl_kernels.models import head_logp, invariant

ROWS, SIZE, VOCAB = 6, 24, 101


@pytest.fixture
def hidden():
    return Draw(torch.float32, seed=2).normal(ROWS, SIZE).requires_grad_()


@pytest.fixture
def ids():
    return Draw(torch.float32, seed=3).ids(VOCAB, ROWS)


def head(kind=nn.Linear, **options):
    torch.manual_seed(1)
    return kind(SIZE, VOCAB, **options)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [nn.Linear, DetLinear])
def test_bits_are_those_of_linear_logp(kind, hidden, ids):
    options = {"temperature": 0.7, "softcap": 30.0, "return_stats": True}
    for bias in (True, False):
        made = head(kind, bias=bias)
        expected = linear_logp(hidden, made.weight, ids, made.bias, **options)
        assert all(torch.equal(a, b) for a, b in zip(head_logp(made, hidden, ids, **options), expected, strict=True))
        with invariant(nn.Sequential(made)):
            assert torch.equal(head_logp(made, hidden, ids, **options).logp, expected.logp)


def adapted(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=5, lora_alpha=11, target_modules=["0"], **options)
    model = peft.get_peft_model(nn.Sequential(head()), config)
    found = model.base_model.model[0]
    for name, value in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(value, std=0.3)
    return model, found


@pytest.mark.smoke
def test_lora_joins_the_logits_and_gradients_reach_it(hidden, ids):
    model, made = adapted()
    weights = [made.lora_A["default"].weight, made.lora_B["default"].weight]
    found = head_logp(made, hidden, ids)
    logits = made(hidden)
    expected = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    without = linear_logp(hidden, made.base_layer.weight, ids, made.base_layer.bias)
    assert (found - without).abs().max() > 0.1
    grads = [torch.autograd.grad(value.sum(), [hidden, *weights]) for value in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # Rows are functions of themselves alone here too.
    assert torch.equal(head_logp(made, hidden[2:3], ids[2:3]), found[2:3])
    with model.disable_adapter():
        assert torch.equal(head_logp(made, hidden, ids), without)
    model.merge_adapter()
    torch.testing.assert_close(head_logp(made, hidden, ids), expected, rtol=1e-5, atol=1e-5)


def saved_whole():
    """Return a model, and its head, which PEFT trains as a whole."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(SIZE, SIZE), head())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"]))
    return model, model.base_model.model[1]


def test_a_head_that_peft_trains_as_a_whole(hidden, ids):
    model, made = saved_whole()
    trained = made.modules_to_save["default"]
    nn.init.normal_(trained.weight)
    found = head_logp(made, hidden, ids)
    assert torch.equal(found, head_logp(trained, hidden, ids))
    found.sum().backward()
    assert trained.weight.grad.any()
    with model.disable_adapter():
        assert torch.equal(head_logp(made, hidden, ids), head_logp(made.original_module, hidden, ids))
    with invariant(model):
        assert torch.equal(head_logp(made, hidden, ids), found)
    trained.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="head: expected no forward hooks, on it or inside it"):
        head_logp(made, hidden, ids)


@pytest.mark.smoke
def test_what_it_cannot_do_it_names(hidden, ids):
    _, dropping = adapted(lora_dropout=0.5)
    with pytest.raises(ValueError, match=r"head: expected no active dropout in adapter 'default', got 0\.5"):
        head_logp(dropping.train(), hidden, ids)
    head_logp(dropping.eval(), hidden, ids)
    _, other = adapted(use_dora=True)
    with pytest.raises(TypeError, match="head: adapter 'default' is not plain LoRA"):
        head_logp(other, hidden, ids)
    hooked = head()
    hooked.register_forward_hook(lambda module, given, output: output / 2)
    with pytest.raises(TypeError, match="head: expected no forward hooks"):
        head_logp(hooked, hidden, ids)
    for inside in ("base_layer", "lora_A", "lora_B"):
        _, made = adapted()
        found = getattr(made, inside)
        (found if inside == "base_layer" else found["default"]).register_forward_hook(lambda *_: None)
        with pytest.raises(TypeError, match="head: expected no forward hooks, on it or inside it"):
            head_logp(made, hidden, ids)
    replaced = head()
    replaced.forward = lambda hidden: hidden
    with pytest.raises(TypeError, match="head: expected the forward of each class"):
        head_logp(replaced, hidden, ids)
    with pytest.raises(TypeError, match=r"got .*ParametrizedLinear"):
        head_logp(nn.utils.parametrizations.weight_norm(head()), hidden, ids)
    with pytest.raises(TypeError, match=r"nn\.Linear or one with a LoRA adapter, got torch\.nn\..*Sequential"):
        head_logp(nn.Sequential(head()), hidden, ids)
    with pytest.raises(TypeError, match=r"head: expected an nn\.Module, got Tensor"):
        head_logp(torch.ones(2), hidden, ids)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.usefixtures("one_process")
def test_a_sharded_head_that_peft_trains_as_a_whole(hidden, ids, inside):
    _, made = saved_whole()
    expected = head_logp(made, hidden, ids)
    fully_shard(made.modules_to_save["default"] if inside else made)
    found = head_logp(made, hidden, ids)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert made.modules_to_save["default"].weight.grad.full_tensor().any()


@pytest.mark.usefixtures("one_process")
def test_a_sharded_head_gathers_its_weight_and_reduces_its_gradient(hidden, ids):
    made, plain = head(), head()
    expected = head_logp(plain, hidden, ids, return_stats=True)
    (expected.logp.sum() + expected.entropy.sum()).backward()
    fully_shard(made)
    found = head_logp(made, hidden, ids, return_stats=True)
    (found.logp.sum() + found.entropy.sum()).backward()
    assert torch.equal(found.logp, expected.logp)
    assert torch.equal(made.weight.grad.full_tensor(), plain.weight.grad)
    assert torch.equal(made.bias.grad.full_tensor(), plain.bias.grad)
    assert made(hidden).shape == (ROWS, VOCAB)
