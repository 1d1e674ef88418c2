"""Losses that are planned once: the launches of the general path, and where they are not to be taken."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from rl_kernels.core import dispatch, record_dispatch
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonRecorder
from rl_kernels.grpo_loss import Normalizer, api, grpo_loss, grpo_loss_from_advantages
from rl_kernels.grpo_loss.backends.native import backend as native

MODULES = tuple(f"rl_kernels.grpo_loss.backends.triton.{name}" for name in ("planned", "backend"))
BUGS = (
    Bug("plan accepts any layout of rows", "all(rows_of(x) is x for x in tensors)", "True"),
    Bug("planned backward overwrites what is needed again", "if overwrite and", "if"),
)
Special = type("Special", (torch.Tensor,), {})
"""A class of a user."""


def arguments(batch=4, length=5, dtype=torch.float32):
    torch.manual_seed(1)
    current, old, ref = (-torch.rand(batch, length).to(dtype) for _ in range(3))
    return current, old, ref, torch.rand(batch), torch.rand(batch, length) < 0.8


def raw(function, *given, **options):
    """Return the arguments of the raw op of a call."""
    made = []
    # A call that is recorded takes no plan.
    with pytest.MonkeyPatch.context() as patch, record_dispatch():
        patch.setattr(api, "run", lambda call, backend: made.append(call))
        function(*given, **{"beta": 0.25, "validate": False, **options})
    return made[0]


rewarded = partial(raw, grpo_loss, samples_per_prompt=2)


def scored(advantages, shape=(4, 9)):
    current, old, ref, _, mask = arguments(*shape)
    return raw(grpo_loss_from_advantages, current, old, ref, advantages, mask)


def calls():
    """Return calls with a plan, and without: needing copies, without tokens, or with more than the plain loss."""
    current, old, ref, rewards, mask = given = arguments(4, 9)
    # The same numbers in rows that are further apart.
    old_apart, advantages = (torch.cat((x, x[:, :1]), 1)[:, :9] for x in (old, ref))
    planned = [
        rewarded(*given),
        rewarded(*arguments(4, 9, torch.bfloat16)),
        rewarded(*arguments(4, 4097)),
        rewarded(current, None, ref, rewards, mask),
        rewarded(current, old, None, rewards, mask, beta=0.0),
        rewarded(current, old_apart, ref, torch.rand(8)[::2], mask),
        scored(rewards),
        scored(advantages),
    ]
    others = [
        rewarded(current.t().contiguous().t(), old, ref, rewards, mask),
        rewarded(current, old, ref, rewards, mask.t().contiguous().t()),
        scored(rewards[:, None].expand(4, 9)),
        scored(rewards.as_strided((4, 1), (1, 0)), (4, 1)),
        rewarded(*given, samples_per_prompt=None, group_boundaries=torch.tensor([0, 1, 4])),
        rewarded(*arguments(4, 0)),
        rewarded(*arguments(0, 9)),
        rewarded(*given, loss_type="cispo"),
        rewarded(*given, return_metrics=True),
        rewarded(*given, normalizer=Normalizer(num_tokens=torch.ones(()))),
    ]
    return planned, others


def layout(x):
    return None if x is None else (x.shape, x.stride(), x.dtype)


def described(launches, known):
    """Return all that launches are; of an output, its layout."""
    names = {x.data_ptr(): name for name, x in known.items() if x is not None}

    def value_of(x):
        return (names.get(x.data_ptr()), layout(x)) if isinstance(x, torch.Tensor) else x

    return [(x.name, x.grid, x.options, {key: value_of(x[key]) for key in x.arguments}) for x in launches]


def check_same(recorder, plan, backend, call):
    """Compare the launches of a plan with those of the general path."""
    scores = call.advantages if call.rewards is None else call.rewards
    given = (call.current_logps, call.old_logps, call.ref_logps, scores, call.mask)
    known = dict(zip(("current", "old", "ref", "scores", "mask"), given, strict=True))

    def run(function):
        recorder.launches.clear()
        found = function()
        assert found is not None
        return described(recorder.launches, known), found

    for slope, general in ((False, backend.forward), (True, backend.forward_grad)):
        ours, found = run(partial(plan.forward, *given, needs_slope=slope))
        theirs, (loss, policy_loss, kl, _, *rest) = run(partial(general, *call))
        assert ours == theirs
        wanted = (loss, policy_loss, kl, torch.empty(()), rest[-1] if slope else None)
        assert [*map(layout, found)] == [*map(layout, wanted)]
    known |= {"count": found[3], "slope": found[4], "upstream": (upstream := torch.ones(()))}
    count, slope = found[3:]
    saved = (call.current_logps, count, slope, upstream)

    def general_backward(overwrite):
        if not overwrite or call.current_logps.dtype != torch.float32:
            return backend.backward(*saved)
        backend.backward_inplace(slope, count, upstream)
        return slope

    for overwrite in (False, True):
        ours, found = run(partial(plan.backward, *saved, overwrite=overwrite))
        theirs, wanted = run(partial(general_backward, overwrite))
        assert ours == theirs
        assert layout(found) == layout(wanted)


def check_refusals(recorder, plan, current):
    """A plan launches nothing for tensors that a hook of saved tensors may have put in the place of its own."""
    one, slope = torch.ones(()), torch.rand(current.shape)
    good = (current, one, slope, one)
    others = {
        0: (current.double(),),
        1: (torch.ones(2), one.double()),
        2: (slope.double(), slope.t().contiguous().t(), slope[:1]),
        3: (torch.ones(2), one.double(), one.as_subclass(Special), torch._neg_view(one)),
    }
    recorder.launches.clear()
    for place, bad in others.items():
        for other in bad:
            assert plan.backward(*good[:place], other, *good[place + 1 :], overwrite=True) is None
    assert not recorder.launches


def check_all(plant=nullcontext):
    with TritonRecorder().pretended() as recorder, plant():
        backend = importlib.import_module(MODULES[-1])
        # Any address is one that was met before: what is compiled for another kind of tensors shows.
        importlib.import_module("rl_kernels.core.triton_lib.launch").ALIGNMENT = 1
        planned, others = calls()
        assert all(backend.planned(call) is None for call in others)
        for call in planned:
            plan = backend.planned(call)
            check_same(recorder, plan, backend, call)
            # Other tensors of the same kind.
            copies = (x.clone() if isinstance(x, torch.Tensor) and x.is_contiguous() else x for x in call)
            check_same(recorder, plan, backend, call._make(copies))
            check_refusals(recorder, plan, call.current_logps)
        # A reference is given, and not read.
        current, old, ref, rewards, mask = arguments()
        plan = backend.planned(rewarded(current, old, None, rewards, mask, beta=0.0))
        recorder.launches.clear()
        plan.forward(current, old, ref, rewards, mask, needs_slope=False)
        assert recorder.launches[0]["ref"] is None


def test_launches_are_those_of_the_general_path():
    check_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug):
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError)):
        check_all(partial(planted, MODULES, bug))


class Fake:
    """Launches that are native's, and counted."""

    def __init__(self, call):
        self.call, self.calls = call, []

    def forward(self, current, old, ref, scores, mask, needs_slope):
        self.calls.append("forward with slope" if needs_slope else "forward")
        name = "advantages" if self.call.rewards is None else "rewards"
        given = self.call._replace(current_logps=current, old_logps=old, ref_logps=ref, mask=mask, **{name: scores})
        loss, policy_loss, kl, _, *rest = native.forward_grad(*given)
        return loss, policy_loss, kl, *rest

    def backward(self, *saved, overwrite):
        self.calls.append("backward")
        return native.backward(*saved)


@pytest.fixture
def fake(monkeypatch):
    """Let calls be planned as ``Fake``; return its instances."""
    made = []
    monkeypatch.setattr(native, "planned", lambda call: made.append(Fake(call)) or made[-1], raising=False)
    dispatch.forget()
    yield made
    dispatch.forget()


def test_a_planned_call_gives_what_the_general_path_gives(fake):
    for function, scores in ((grpo_loss, {"samples_per_prompt": 2}), (grpo_loss_from_advantages, {})):
        given = arguments()
        leaf, other = given[0].clone().requires_grad_(), given[0].clone().requires_grad_()
        found = function(leaf, *given[1:], beta=0.1, **scores)
        found.loss.backward()
        with record_dispatch():
            expected = function(other, *given[1:], beta=0.1, **scores)
        expected.loss.backward()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert torch.equal(leaf.grad, other.grad)
        assert [value.requires_grad for value in found] == [True, False, False]
        assert function(*given, beta=0.1, **scores).loss.requires_grad is False
        assert fake[-1].calls == ["forward with slope", "backward", "forward"]
    assert len(fake) == 2


def test_observed_calls_and_classes_of_others_take_the_general_path(fake):
    given = arguments()
    for place in range(5):
        special = [x.as_subclass(Special) if at == place else x for at, x in enumerate(given)]
        grpo_loss(*special, samples_per_prompt=2)
        grpo_loss_from_advantages(*special)
    assert not fake
    leaf, *rest = given
    leaf.requires_grad_()
    loss = grpo_loss(leaf, *rest, samples_per_prompt=2).loss
    with torch.autograd.profiler.profile() as seen:
        torch.autograd.grad(loss, leaf, retain_graph=True)
        grpo_loss(leaf, *rest, samples_per_prompt=2)
    names = {event.name for event in seen.function_events}
    assert {"rl_kernels::grpo_loss_backward", "rl_kernels::grpo_loss_forward_grad"} <= names
    assert fake[0].calls == ["forward with slope"]
    torch.func.functionalize(lambda x: grpo_loss(x, *rest, samples_per_prompt=4).loss)(leaf.detach())
    assert len(fake) == 1


def test_second_derivatives_and_tangents_are_refused(fake):
    leaf, *rest = arguments()
    leaf.requires_grad_()
    losses = [grpo_loss(leaf, *rest, samples_per_prompt=2).loss for _ in range(2)]
    (grad,) = torch.autograd.grad(losses[0], leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        upstream = torch.autograd.forward_ad.make_dual(torch.tensor(1.0), torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
            torch.autograd.grad(losses[1], leaf, upstream)
        with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
            grpo_loss(torch.autograd.forward_ad.make_dual(leaf.detach(), leaf.detach()), *rest, samples_per_prompt=2)
    assert fake[0].calls == ["forward with slope"] * 2
