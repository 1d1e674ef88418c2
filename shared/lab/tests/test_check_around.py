"""What surrounds a call, what a call leaves behind, and calls in great number: each bug shows in the check for it.

The toy multiplies a matrix by a vector; the honest one does so element by element, which autocast leaves alone.
"""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch

from rl_kernels.core.testing import Case, IllegalCall, Spec, edited
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import determinism, hold
from rl_kernels.lab.check.result import Check
from rl_kernels.lab.check.surroundings import Surroundings, changed, global_state

RESULTS = ("output", "gradient:x")


def definition(x, weight):
    """The matrix times the vector."""
    return (x * weight).sum(-1)


def _magnitudes(case, inputs, upstream):
    x, weight = inputs["x"].abs(), inputs["weight"].abs()
    up = upstream.get("output", x[:, 0]).abs()
    return {"output": x @ weight, "gradient:x": up[:, None] * weight}


SPEC = Spec(
    cases=(Case("plain", {"rows": 6, "width": 4}), Case("other", {"rows": 6, "width": 4})),
    inputs=lambda case, draw: {"x": draw.normal(6, 4), "weight": draw.normal(4)},
    references={"": definition},
    classes=dict.fromkeys(RESULTS, "reduction"),
    differentiable=("x",),
    magnitudes=_magnitudes,
    transforms={},
    illegal=(),
)
CAST = Spec(**{**vars(SPEC), "autocast": {"": ("x", "weight")}})


class Saving(torch.autograd.Function):
    """The definition with what its backward pass needs; the tests write that pass."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return definition(x, weight)


class Toy:
    name = "toy"


def records(function, relation, spec=SPEC, case="plain"):
    candidate = Candidate("toy", Toy, lambda _, kwargs: function(**kwargs))
    return list(hold(Cell(candidate, spec, spec.case(case), Setting("fp32", torch.device("cpu"), "cpu")), relation))


def failed(function, relation="hygiene", spec=SPEC, case="plain"):
    found = records(function, relation, spec, case)
    return {each.item: each.comparison.message for each in found if isinstance(each, Check) and not each.passed}


@pytest.mark.parametrize("relation", ["hygiene", "invariance", "repeatability"])
def test_an_honest_implementation_holds(relation):
    assert not failed(definition, relation)


def test_a_dtype_that_follows_the_default_shows():
    found = failed(lambda x, weight: definition(x, weight) + torch.zeros(1))
    assert found.keys() == {"output, default dtype FP64", "default device meta"}
    assert "float64" in found["output, default dtype FP64"]


def test_a_buffer_on_the_default_device_shows():
    def call(x, weight):
        return torch.zeros(len(x)).to(x.dtype).add_(definition(x, weight)) if x.requires_grad else definition(x, weight)

    assert "default device meta" in failed(call)


def test_what_follows_inference_mode_shows():
    found = failed(lambda x, weight: definition(x, weight) * (1 + 1e-6 * torch.is_inference_mode_enabled()))
    assert found.keys() == {"output, inference mode"}


def test_what_a_first_call_in_inference_mode_keeps_fails_the_training_that_follows():
    kept = {}

    def call(x, weight):
        return definition(x, weight) * kept.setdefault(x.dtype, torch.ones(1))

    assert not failed(call, "accuracy")
    assert any("nference tensor" in message for message in failed(call, "gradients").values())
    kept.clear()
    assert not failed(call, "gradients")


def test_what_autocast_casts_is_said_by_the_operator():
    def product(x, weight):
        return x @ weight

    assert "output, autocast" in failed(product)
    assert "output, autocast" not in failed(product, spec=CAST)
    assert "output, autocast" in failed(definition, spec=CAST)


def test_a_backward_pass_inside_autocast_shows():
    class Product(Saving):
        @staticmethod
        def backward(ctx, grad):
            return grad[:, None] @ ctx.saved_tensors[0][None, :], None

    found = failed(lambda x, weight: Product.apply(x, weight))
    assert found.keys() == {f"gradient:x, autocast{dtype}, backward inside" for dtype in ("", " to FP16")}


def test_a_result_that_follows_the_matmul_precision_shows():
    def call(x, weight):
        return definition(x, weight) * (1 + 1e-6 * (torch.get_float32_matmul_precision() == "medium"))

    assert failed(call).keys() == {"output, matmul precision medium"}


def test_an_upstream_gradient_that_is_written_into_is_named():
    class Scales(Saving):
        @staticmethod
        def backward(ctx, grad):
            return grad.mul_(2)[:, None] * ctx.saved_tensors[0] / 2, None

    found = failed(lambda x, weight: Scales.apply(x, weight))
    assert found == {"run": "backward wrote into the upstream gradient of output"}


def test_a_gradient_that_is_handed_out_twice_shows():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.gradient = weight.expand(x.shape).clone()
            return definition(x, weight)

        @staticmethod
        def backward(ctx, grad):
            return ctx.gradient, None

    spec = Spec(**{**vars(SPEC), "references": {"": lambda x, weight: Keeps.apply(x, weight)}})
    assert "backward again" in failed(lambda x, weight: Keeps.apply(x, weight), spec=spec)


def test_an_argument_that_is_computed_gets_its_gradient():
    def call(x, weight):
        return definition(x if x.is_leaf else x.detach() + 0 * x, weight)

    assert failed(call).keys() == {"gradient:x, arguments computed"}


def test_a_dtype_that_autocast_was_not_asked_for_shows():
    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return (x.bfloat16() @ weight.bfloat16()) if torch.is_autocast_enabled("cpu") else x @ weight

        @staticmethod
        def backward(ctx, grad):
            return grad[:, None].float() * ctx.saved_tensors[0].to(grad.dtype).float(), None

    found = failed(lambda x, weight: Cast.apply(x, weight), spec=CAST)
    assert "output, autocast to FP16" in found
    assert "output, autocast" not in found


def test_a_constant_that_is_not_detached_shows_where_it_is_the_argument():
    spec = Spec(
        **{
            **vars(SPEC),
            "inputs": lambda case, draw: {"x": draw.normal(6, 4), "weight": draw.normal(6, 4)},
            "references": {"": lambda x, weight: (x * weight.detach()).sum(-1)},
        }
    )
    assert not failed(spec.references[""], spec=spec)
    assert failed(definition, spec=spec).keys() == {"gradient:x, weight is x"}


def test_what_a_refused_call_leaves_changed_shows():
    def refuses(x, weight):
        if x.dtype != weight.dtype:
            torch.set_grad_enabled(False)
            raise ValueError("x: expected the dtype of weight")
        return definition(x, weight)

    bad = IllegalCall("other dtype", edited("x", torch.Tensor.double), ValueError, "x")
    found = failed(refuses, spec=Spec(**{**vars(SPEC), "illegal": (bad,)}))
    assert "changed global state: grad mode" in found["after refused calls"]


def test_a_parameter_that_is_kept_by_version_shows_where_it_is_written_through_data():
    held = {}

    def call(x, weight):
        if not isinstance(x, torch.nn.Parameter) or x._version != held.setdefault(id(x), (x, x._version, x.clone()))[1]:
            return definition(x, weight)
        return definition(held[id(x)][2], weight)

    assert failed(call).keys() == {"inputs updated unseen, parameters"}


def test_a_result_that_follows_the_number_of_threads_shows():
    found = failed(lambda x, weight: definition(x, weight) * (1 + 1e-6 * torch.get_num_threads()), "invariance")
    assert found.keys() == {"threads"}


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


@pytest.fixture
def restored(tmp_path, monkeypatch):
    """Take back whatever a test changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_TOY", "0")
    threads, precision, handler = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        signal.getsignal(signal.SIGINT),
    )
    tf32 = torch.backends.cudnn.allow_tf32
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_default_device(None)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)
    torch.backends.cudnn.allow_tf32 = tf32
    signal.signal(signal.SIGINT, handler)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_global_state_is_named(name, restored):
    def call(x, weight):
        CHANGES[name]()
        return definition(x, weight)

    message = failed(call, "repeatability")["run"]
    assert message.startswith("forward changed global state: ")
    assert name in message


def test_a_change_in_the_backward_pass_is_named(restored):
    def call(x, weight):
        result = definition(x, weight)
        if result.requires_grad:
            result.register_hook(lambda grad: os.environ.update(RL_TOY="2"))
        return result

    assert failed(call, "repeatability") == {"run": "backward changed global state: environment"}


def test_what_is_kept_by_address_or_version_shows_where_inputs_are_updated():
    held = {}

    def by_version(x, weight):
        # Kept on the tensor itself, so that another tensor at the same address does not meet it.
        found = held.get(id(x))
        if found is None or found[0] is not x or found[1] != x._version:
            held[id(x)] = found = x, x._version, x.detach().clone()
        return definition(x - x.detach() + found[2], weight)

    unseen = {f"inputs updated unseen{where}" for where in ("", " in one place")}
    alone = {"inputs updated unseen, parameters", "inputs updated unseen by little, no gradients"}
    without = {*alone, *(f"{item}, no gradients" for item in unseen)}
    assert failed(by_version).keys() == {"inputs updated unseen, permuted"} | unseen | without

    def by_identity(x, weight):
        found = held.get(id(x))
        if found is None or found[0] is not x:
            held[id(x)] = found = x, x.detach().clone()
        return definition(x - x.detach() + found[1], weight)

    held.clear()
    assert failed(by_identity).keys() >= {"inputs updated in place", "inputs updated unseen"}

    def without_gradients(x, weight):
        return definition(x, weight) if x.requires_grad else by_identity(x, weight)

    held.clear()
    assert failed(without_gradients).keys() >= {"inputs updated unseen, no gradients"}


def test_what_knows_its_inputs_by_some_of_their_numbers_shows():
    held = {}

    def by_first_number(x, weight):
        found = held.setdefault(id(x), (x, x.detach().clone()))
        if found[1][0, 0] != x[0, 0]:
            held[id(x)] = found = x, x.detach().clone()
        return definition(x - x.detach() + found[1], weight)

    found = failed(by_first_number)
    assert found.keys() == {f"inputs updated unseen in one place{which}" for which in ("", ", no gradients")}


def test_what_knows_its_inputs_by_their_sums_shows():
    held = {}

    def by_sums(x, weight):
        sums = x.detach().double().sum().round(decimals=4), x.detach().double().square().sum().round(decimals=4)
        found = held.get(id(x))
        if found is None or found[0] is not x or found[1] != sums:
            held[id(x)] = found = x, sums, x.detach().clone()
        return definition(x - x.detach() + found[2], weight)

    little = "inputs updated unseen by little, no gradients"
    assert failed(by_sums).keys() == {"inputs updated unseen, permuted", little}


def test_what_an_attribute_keeps_for_the_backward_pass_shows_where_it_is_written():
    class Unversioned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return definition(x, weight)

        @staticmethod
        def backward(ctx, grad):
            return grad[:, None] * ctx.weight, None

    found = failed(lambda x, weight: Unversioned.apply(x, weight))
    assert found.keys() == {"weight written before backward"}


def test_a_ring_of_what_is_kept_for_backward_passes_shows():
    ring, calls = {}, [0]

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            calls[0] += 1
            ctx.place = calls[0] % 256
            ring[ctx.place] = weight.clone()
            return definition(x, weight)

        @staticmethod
        def backward(ctx, grad):
            return grad[:, None] * ring[ctx.place], None

    assert failed(lambda x, weight: Ring.apply(x, weight)).keys() >= {"300 calls pending"}


@pytest.mark.parametrize("length", [2, 3, 24, 48])
def test_a_ring_of_results_shows(length):
    ring, calls = torch.empty(length, 6), [0]

    def call(x, weight):
        if x.requires_grad:
            return definition(x, weight)
        calls[0] += 1
        return ring[calls[0] % length].copy_(definition(x, weight))

    assert "thousands of calls" in failed(call, "repeatability")


FIRST_COLUMN = Spec(
    **{
        **vars(SPEC),
        "references": {"": lambda x, weight: x[:, 0] + 0 * weight.sum()},
    }
)


def test_a_result_that_is_a_view_of_an_input_shows():
    def view(x, weight):
        return x[:, 0] if not weight.requires_grad else x[:, 0] + 0 * weight.sum()

    found = failed(view, spec=FIRST_COLUMN)
    assert found["inputs updated unseen, no gradients"] == "output changed with the inputs: it shares their storage"


def test_a_result_that_is_given_twice_shows_once_it_is_written_into():
    held = {}

    def call(x, weight):
        given = (x.detach().clone(), weight.detach().clone())
        for others, result in held.values():
            if result.requires_grad == x.requires_grad and all(map(torch.equal, others, given)):
                return definition(x, weight) * 0 + result.detach()
        result = definition(x, weight)
        held[len(held)] = given, result
        return result

    assert "results written into" in failed(call)


def test_a_result_that_no_one_may_write_into_shows():
    def expanded(x, weight):
        return definition(x, weight).sum().expand(6)

    spec = Spec(**{**vars(SPEC), "references": {"": expanded}})
    assert "writing into a result raised RuntimeError" in failed(expanded, spec=spec)["results written into"]


def test_a_state_that_goes_bad_after_many_calls_shows():
    calls = [0]

    def call(x, weight):
        calls[0] += not x.requires_grad
        return definition(x, weight) * (1 + 1e-6 * (calls[0] >= 40))

    assert failed(call, "repeatability")["thousands of calls"].startswith("call 40: output: ")
    assert not failed(definition, "repeatability", case="other")
    assert "thousands of calls" not in {each.item for each in records(definition, "repeatability", case="other")}


def test_the_calls_end_when_their_time_is_over(monkeypatch):
    calls = [0]

    def call(x, weight):
        calls[0] += 1
        time.sleep(0.01)
        return definition(x, weight)

    monkeypatch.setattr(determinism, "CALLS", 10**6)
    monkeypatch.setattr(determinism, "SECONDS", {"quick": 0.2, "full": 0.2})
    assert not failed(call, "repeatability")
    assert calls[0] < 100


def test_two_threads_that_share_a_buffer_show():
    buffer = torch.empty(6)

    def call(x, weight):
        if x.requires_grad:
            return definition(x, weight)
        buffer.copy_(definition(x, weight))
        time.sleep(0.02)
        return buffer.clone()

    assert failed(call, "repeatability").keys() == {"two threads at once"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_thread_shows(error):
    def call(x, weight):
        if threading.current_thread() is not threading.main_thread():
            raise error("here alone")
        return definition(x, weight)

    assert failed(call, "repeatability")["two threads at once"].startswith(f"forward raised {error.__name__}: here")
