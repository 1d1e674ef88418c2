"""What surrounds a call: each bug shows in the check for it."""

import os
import random
import signal
from functools import partial

import numpy as np
import pytest
import torch

from rl_kernels.core.testing import IllegalCall, edited
from rl_kernels.lab.check.surroundings import Surroundings, changed, global_state

CAST = {"": ("x", "weight")}
"""Arguments that an operator casts under autocast."""


@pytest.fixture
def definition(product):
    return product.definition


@pytest.mark.smoke
@pytest.mark.parametrize("relation", ["hygiene", "invariance", "repeatability"])
def test_an_honest_implementation_holds(relation, definition, failed):
    assert not failed(definition, relation)


def by_default_device(x, weight):
    total = (x * weight).sum(-1)
    return torch.zeros(len(x)).to(x.dtype).add_(total) if x.requires_grad else total


FOLLOWS = {
    "inference mode": ("hygiene", "output, inference mode", torch.is_inference_mode_enabled),
    "matmul precision": (
        "hygiene",
        "output, matmul precision medium",
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
    "threads": ("invariance", "threads", torch.get_num_threads),
}


@pytest.mark.parametrize("what", FOLLOWS)
def test_a_result_that_follows_a_state_shows(what, definition, failed):
    relation, item, state = FOLLOWS[what]
    assert failed(lambda x, weight: definition(x, weight) * (1 + 1e-6 * state()), relation).keys() == {item}


def test_what_follows_the_default_dtype_or_device_shows(definition, failed):
    found = failed(lambda x, weight: definition(x, weight) + torch.zeros(1))
    assert found.keys() == {"output, default dtype FP64", "default device meta"}
    assert "float64" in found["output, default dtype FP64"]
    assert "default device meta" in failed(by_default_device)


def test_what_a_first_call_in_inference_mode_keeps_fails_the_training_that_follows(definition, failed):
    kept = {}

    def call(x, weight):
        return definition(x, weight) * kept.setdefault(x.dtype, torch.ones(1))

    assert not failed(call, "accuracy")
    assert any("nference tensor" in message for message in failed(call, "gradients").values())
    kept.clear()
    assert not failed(call, "gradients")


def test_what_autocast_casts_is_said_by_the_operator(definition, failed):
    def product(x, weight):
        return x @ weight

    assert "output, autocast" in failed(product)
    assert "output, autocast" not in failed(product, autocast=CAST)
    assert "output, autocast" in failed(definition, autocast=CAST)


def test_a_backward_pass_inside_autocast_shows(product, failed):
    def backward(ctx, grad):
        return grad[:, None] @ ctx.saved_tensors[0][None, :], None

    found = failed(product.differentiated(backward))
    assert found.keys() == {f"gradient:x, autocast{dtype}, backward inside" for dtype in ("", " to FP16")}


def test_a_dtype_that_autocast_was_not_asked_for_shows(product, failed):
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return (x.bfloat16() @ weight.bfloat16()) if torch.is_autocast_enabled("cpu") else x @ weight

    def backward(ctx, grad):
        return grad[:, None].float() * ctx.saved_tensors[0].to(grad.dtype).float(), None

    found = failed(product.differentiated(backward, forward), autocast=CAST)
    assert "output, autocast to FP16" in found
    assert "output, autocast" not in found


def test_an_argument_that_is_computed_gets_its_gradient(definition, failed):
    def call(x, weight):
        return definition(x if x.is_leaf else x.detach() + 0 * x, weight)

    assert failed(call).keys() == {"gradient:x, arguments computed"}


def test_a_constant_that_is_not_detached_shows_where_it_is_the_argument(definition, failed):
    def detached(x, weight):
        return (x * weight.detach()).sum(-1)

    changes = {
        "inputs": lambda case, draw: {"x": draw.normal(6, 4), "weight": draw.normal(6, 4)},
        "references": {"": detached},
    }
    assert not failed(detached, **changes)
    assert failed(definition, **changes).keys() == {"gradient:x, weight is x"}


def test_what_a_refused_call_leaves_changed_shows(definition, failed):
    def refuses(x, weight):
        if x.dtype != weight.dtype:
            torch.set_grad_enabled(False)
            raise ValueError("x: expected the dtype of weight")
        return definition(x, weight)

    bad = IllegalCall("other dtype", edited("x", torch.Tensor.double), ValueError, "x")
    found = failed(refuses, illegal=(bad,))
    assert "changed global state: grad mode" in found["after refused calls"]


def test_surroundings_end_with_their_block():
    before = global_state()
    around = Surroundings(torch.get_num_threads() + 1, True, torch.float64, "meta", torch.bfloat16, True)
    with around.entered("cpu"):
        inside = changed(before)
    assert {"number of threads", "default dtype", "default device", "autocast", "inference mode"} <= set(inside)
    assert changed(before) == []


CHANGES = {
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "torch random generator": lambda: torch.rand(1, device="cpu"),
    "Python random generator": random.random,
    "NumPy random generator": np.random.rand,
    "grad mode": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "TF32": lambda: setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32),
    "flushing of subnormal numbers": lambda: torch.set_flush_denormal(True),
    "environment": lambda: os.environ.update(RL_TOY="1"),
    "working directory": lambda: os.chdir("/"),
    "handler of SIGINT": lambda: signal.signal(signal.SIGINT, lambda *_: None),
}


RESTORED = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (partial(signal.getsignal, signal.SIGINT), partial(signal.signal, signal.SIGINT)),
    (lambda: torch.backends.cudnn.allow_tf32, partial(setattr, torch.backends.cudnn, "allow_tf32")),
    (lambda: None, torch.set_default_device),
    (lambda: False, torch.set_flush_denormal),
)


@pytest.fixture
def restored(tmp_path, monkeypatch):
    """Take back whatever a test changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_TOY", "0")
    before = [(write, read()) for read, write in RESTORED]
    yield
    for write, value in reversed(before):
        write(value)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_global_state_is_named(name, restored, definition, failed):
    def call(x, weight):
        CHANGES[name]()
        return definition(x, weight)

    message = failed(call, "repeatability")["run"]
    assert message.startswith("forward changed global state: ")
    assert name in message


def test_a_change_in_the_backward_pass_is_named(restored, definition, failed):
    def call(x, weight):
        result = definition(x, weight)
        if result.requires_grad:
            result.register_hook(lambda grad: os.environ.update(RL_TOY="2"))
        return result

    assert failed(call, "repeatability") == {"run": "backward changed global state: environment"}
