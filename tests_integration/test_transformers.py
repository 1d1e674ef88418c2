"""A real client: the hidden states and lm_head of transformers' Llama through linear_logp, against its own logits."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from rl_kernels.core.contract import contract  # noqa: E402
from rl_kernels.linear_logp import linear_logp  # noqa: E402

BATCH, LENGTH, VOCAB = 3, 11, 523


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config)
    # The usual 0.02 makes logits too flat to tell a good log-prob from a bad one.
    torch.nn.init.normal_(made.lm_head.weight, std=0.3)
    return made.eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def selected(logits, ids):
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def tolerance(dtype, direction, op_class="logprob"):
    row = contract().tolerance("accuracy", op_class, dtype, direction, "cpu")
    return {"atol": row.atol, "rtol": row.rtol}


def test_fp32_log_probs_and_gradients(model, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    upstream = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(2))
    names = [name for name, _ in model.named_parameters()]

    expected = selected(model(inputs).logits.double(), targets)
    gold = torch.autograd.grad(expected, list(model.parameters()), upstream.double())
    found = linear_logp(model.model(inputs).last_hidden_state, model.lm_head.weight, targets)
    grads = torch.autograd.grad(found, list(model.parameters()), upstream)

    torch.testing.assert_close(found.double(), expected, **tolerance("fp32", "forward"))
    for name, grad, right in zip(names, grads, gold, strict=True):
        torch.testing.assert_close(grad, right, **tolerance("fp32", "gradient", "reduction"), msg=name)
        assert (grad - right).norm() <= 1e-5 * right.norm(), name


def test_bf16_is_closer_than_the_models_own_logits(model, tokens, record_property):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    half = transformers.LlamaForCausalLM(model.config).bfloat16().eval()
    half.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    with torch.no_grad():
        hidden = half.model(inputs).last_hidden_state
        weight = half.lm_head.weight
        gold = selected(hidden.double() @ weight.double().t(), targets)
        ours = (linear_logp(hidden, weight, targets).double() - gold).abs().max()
        theirs = (selected(half(inputs).logits.float(), targets).double() - gold).abs().max()
    print(f"largest error against FP64 logits: linear_logp {ours:.2e}, the model's own BF16 logits {theirs:.2e}")
    record_property("linear_logp", float(ours))
    record_property("model", float(theirs))
    assert ours <= tolerance("fp32", "forward")["atol"]
    assert ours < theirs / 100


def test_bf16_gradients(model, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        hidden = model.model(inputs).last_hidden_state.bfloat16()
    weight = model.lm_head.weight.detach().bfloat16()
    upstream = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(2))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = torch.autograd.grad(linear_logp(*leaves, targets), leaves, upstream)
    gold = torch.autograd.grad(selected(exact[0] @ exact[1].t(), targets), exact, upstream.double())
    for grad, right, op_class in zip(found, gold, ("logprob", "reduction"), strict=True):
        torch.testing.assert_close(grad.double(), right, **tolerance("bf16", "gradient", op_class))
        assert (grad.double() - right).norm() <= 4e-3 * right.norm()
