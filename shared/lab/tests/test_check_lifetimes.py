"""What a call leaves behind, and calls in great number: each bug shows in the check for it."""

import threading
import time

import pytest
import torch

from rl_kernels.lab.check.relations import determinism

UNSEEN = {f"inputs updated unseen{where}" for where in ("", " in one place")}
UNSEEN |= {f"{item}, no gradients" for item in UNSEEN}
LITTLE, PERMUTED = "inputs updated unseen by little, no gradients", "inputs updated unseen, permuted"


@pytest.fixture
def definition(product):
    return product.definition


def kept_by(key):
    """Return an implementation that takes its numbers from a copy as long as ``key(x)`` is the same."""
    held = {}

    def call(x, weight):
        found = held.get(id(x))
        if found is None or found[0] is not x or found[1] != key(x):
            held[id(x)] = found = x, key(x), x.detach().clone()
        return ((x - x.detach() + found[2]) * weight).sum(-1)

    return call


def sums(x):
    wide = x.detach().double()
    return wide.sum().round(decimals=4), wide.square().sum().round(decimals=4)


@pytest.mark.parametrize(
    ("key", "items"),
    [
        (lambda x: x._version, {*UNSEEN, LITTLE, PERMUTED, "inputs updated unseen, parameters"}),
        (lambda x: x[0, 0].item(), {f"inputs updated unseen in one place{which}" for which in ("", ", no gradients")}),
        (sums, {PERMUTED, LITTLE}),
    ],
    ids=["version", "first number", "sums"],
)
def test_what_knows_its_inputs_by_less_than_their_numbers_shows(key, items, failed):
    assert failed(kept_by(key)).keys() == items


def test_what_knows_its_inputs_by_their_address_shows(definition, failed):
    assert failed(kept_by(lambda x: 0)).keys() >= {"inputs updated in place", "inputs updated unseen"}
    by_identity = kept_by(lambda x: 0)

    def without_gradients(x, weight):
        return definition(x, weight) if x.requires_grad else by_identity(x, weight)

    assert failed(without_gradients).keys() >= {"inputs updated unseen, no gradients"}


def test_a_parameter_that_is_kept_by_version_shows_where_it_is_written_through_data(definition, failed):
    held = {}

    def call(x, weight):
        if not isinstance(x, torch.nn.Parameter) or x._version != held.setdefault(id(x), (x, x._version, x.clone()))[1]:
            return definition(x, weight)
        return definition(held[id(x)][2], weight)

    assert failed(call).keys() == {"inputs updated unseen, parameters"}


def test_an_upstream_gradient_that_is_written_into_is_named(product, failed):
    def backward(ctx, grad):
        return grad.mul_(2)[:, None] * ctx.saved_tensors[0] / 2, None

    assert failed(product.differentiated(backward)) == {"run": "backward wrote into the upstream gradient of output"}


def test_a_gradient_that_is_handed_out_twice_shows(product, failed):
    def forward(ctx, x, weight):
        ctx.gradient = weight.expand(x.shape).clone()
        return product.definition(x, weight)

    keeps = product.differentiated(lambda ctx, grad: (ctx.gradient, None), forward)
    assert "backward again" in failed(keeps, references={"": keeps})


def test_what_an_attribute_keeps_for_the_backward_pass_shows_where_it_is_written(product, failed):
    def forward(ctx, x, weight):
        ctx.weight = weight
        return product.definition(x, weight)

    unversioned = product.differentiated(lambda ctx, grad: (grad[:, None] * ctx.weight, None), forward)
    assert failed(unversioned).keys() == {"weight written before backward"}


def test_a_ring_of_what_is_kept_for_backward_passes_shows(product, failed):
    ring, calls = {}, [0]

    def forward(ctx, x, weight):
        calls[0] += 1
        ctx.place = calls[0] % 256
        ring[ctx.place] = weight.clone()
        return product.definition(x, weight)

    kept_in_a_ring = product.differentiated(lambda ctx, grad: (grad[:, None] * ring[ctx.place], None), forward)
    assert failed(kept_in_a_ring).keys() >= {"300 calls pending"}


@pytest.mark.parametrize("length", [2, 3, 24, 48])
def test_a_ring_of_results_shows(length, definition, failed):
    ring, calls = torch.empty(length, 6), [0]

    def call(x, weight):
        if x.requires_grad:
            return definition(x, weight)
        calls[0] += 1
        return ring[calls[0] % length].copy_(definition(x, weight))

    assert "thousands of calls" in failed(call, "repeatability")


def first_column(x, weight):
    return x[:, 0] + 0 * weight.sum()


def test_a_result_that_is_a_view_of_an_input_shows(failed):
    def view(x, weight):
        return first_column(x, weight) if weight.requires_grad else x[:, 0]

    found = failed(view, references={"": first_column})
    assert found["inputs updated unseen, no gradients"] == "output changed with the inputs: it shares their storage"


def test_a_result_that_is_given_twice_or_cannot_be_written_shows_once_it_is_written_into(definition, failed):
    held = {}

    def call(x, weight):
        given = (x.detach().clone(), weight.detach().clone())
        for others, result in held.values():
            if result.requires_grad == x.requires_grad and all(map(torch.equal, others, given)):
                return definition(x, weight) * 0 + result.detach()
        result = definition(x, weight)
        held[len(held)] = given, result
        return result

    def expanded(x, weight):
        return definition(x, weight).sum().expand(6)

    assert "results written into" in failed(call)
    found = failed(expanded, references={"": expanded})
    assert "writing into a result raised RuntimeError" in found["results written into"]


def test_a_state_that_goes_bad_after_many_calls_shows_in_the_plainest_case(definition, failed):
    calls = [0]

    def call(x, weight):
        calls[0] += not x.requires_grad
        return definition(x, weight) * (1 + 1e-6 * (calls[0] >= 40))

    assert failed(call, "repeatability")["thousands of calls"].startswith("call 40: output: ")
    calls[0] = 0
    # Only the first case is called that often.
    assert "thousands of calls" not in failed(call, "repeatability", case="other")


def test_the_calls_end_when_their_time_is_over(definition, failed, monkeypatch):
    calls = [0]

    def call(x, weight):
        calls[0] += 1
        time.sleep(0.01)
        return definition(x, weight)

    monkeypatch.setattr(determinism, "CALLS", 10**6)
    monkeypatch.setattr(determinism, "SECONDS", {"quick": 0.2, "full": 0.2})
    assert not failed(call, "repeatability")
    assert calls[0] < 100


def test_two_threads_that_share_a_buffer_show(definition, failed):
    buffer = torch.empty(6)

    def call(x, weight):
        if x.requires_grad:
            return definition(x, weight)
        buffer.copy_(definition(x, weight))
        time.sleep(0.02)
        return buffer.clone()

    assert failed(call, "repeatability").keys() == {"two threads at once"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_thread_shows(error, definition, failed):
    def call(x, weight):
        if threading.current_thread() is not threading.main_thread():
            raise error("here alone")
        return definition(x, weight)

    assert failed(call, "repeatability")["two threads at once"].startswith(f"forward raised {error.__name__}: here")
