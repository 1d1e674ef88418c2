"""Losses that are planned once: the launches of the general path, and where they are not to be taken."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from rl_kernels.core import dispatch, record_dispatch
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonRecorder
from rl_kernels.grpo_loss import Objective, grpo_loss, grpo_loss_from_advantages
from rl_kernels.grpo_loss.backends.native import backend as native
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.plan import Numbers, Plan

MODULES = tuple(
    f"rl_kernels.grpo_loss.backends.triton.{name}"
    for name in (
        *("groups", "terms", "tokens", "metrics", "sequence", "kernels", "reduce"),
        *("objectives", "plain", "planned", "backend"),
    )
)
BUGS = (
    Bug("plan accepts any layout of rows", "all(rows_of(x) is x for x in tensors)", "True"),
    Bug("planned backward overwrites what is needed again", "if overwrite and", "if"),
)
BACKEND = MODULES[-1]
NUMBERS, PLAIN = Numbers(beta=0.25), Plan()
FAILURES = (AssertionError, RuntimeError, ValueError, TypeError)


def made(batch=4, length=9, dtype=torch.float32, numbers=NUMBERS, plan=PLAIN, metrics=False, **given):
    current, old, ref = (-torch.rand(batch, length).to(dtype) for _ in range(3))
    numbers = torch.tensor(numbers, dtype=torch.float64)
    fields = {"current_logps": current, "old_logps": old, "ref_logps": ref, "rewards": torch.rand(batch), "samples": 2}
    fields |= {"mask": torch.rand(batch, length) < 0.7, "boundaries": None, "advantages": None, "max_seqlen": 0}
    fields |= dict.fromkeys(("rollout_ratio", "entropy", "normaliser", "cu_seqlens"))
    fields |= {"numbers": numbers, "plan": plan.text, "estimator": "population,max,keep", "with_metrics": metrics}
    return LossCall(**(fields | given))


def scored(advantages, **given):
    return made(rewards=None, samples=0, advantages=advantages, **given)


def pitched(x):
    """Return the same numbers in rows that are further apart."""
    return torch.cat((x, x[:, :1]), 1)[:, : x.shape[1]]


CALLS = {
    "rewards": made,
    "bf16": partial(made, dtype=torch.bfloat16, mask=torch.rand(4, 9) < 0.5),
    "long": partial(made, length=4097),
    "on policy": partial(made, old_logps=None),
    "no reference": partial(made, ref_logps=None),
    "rows apart": lambda: made(old_logps=pitched(-torch.rand(4, 9)), rewards=torch.rand(8)[::2]),
    "advantages": lambda: scored(torch.rand(4)),
    "advantages of tokens": lambda: scored(pitched(torch.rand(4, 9))),
}
UNPLANNED = {
    "column": lambda: made(current_logps=-torch.rand(9, 4).t()),
    "mask in columns": lambda: made(mask=(torch.rand(9, 4) < 0.5).t()),
    "expanded": lambda: scored(torch.rand(4, 1).expand(4, 9)),
    "expanded over one token": lambda: scored(torch.rand(4).as_strided((4, 1), (1, 0)), length=1),
    "boundaries": lambda: made(boundaries=torch.tensor([0, 1, 4]), samples=0),
    "empty": partial(made, length=0),
    "nothing": partial(made, batch=0),
    "another objective": partial(made, plan=Plan(kind="cispo")),
    "metrics": partial(made, metrics=True),
    "divisor": lambda: made(normaliser=torch.ones(())),
}


class Wrapper(torch.Tensor):
    """A class of somebody's."""


def moved(call):
    """Return other tensors of one kind."""
    return call._make([x.clone() if isinstance(x, torch.Tensor) and x.is_contiguous() else x for x in call])


def values_of(call):
    return call.advantages if call.rewards is None else call.rewards


def described(launches, known):
    """Return all that launches are; of what they write, how it lies."""
    names = {x.data_ptr(): name for name, x in known.items() if x is not None}

    def told(value):
        if isinstance(value, torch.Tensor):
            return names.get(value.data_ptr()), value.shape, value.stride(), value.dtype
        return value

    return [
        (one.name, one.grid, one.options, {name: told(value) for name, value in one.arguments.items()})
        for one in launches
    ]


def lying(values):
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in values]


def same(recorder, plan, backend, call):
    """Hold the launches of a plan to those of the general path."""
    given = (call.current_logps, call.old_logps, call.ref_logps, values_of(call), call.mask)
    known = dict(zip(("current", "old", "ref", "scores", "mask"), given, strict=True))

    def run(function):
        recorder.launches.clear()
        found = function()
        assert found is not None
        return described(recorder.launches, known), found

    for slope, general in ((False, backend.forward), (True, backend.forward_grad)):
        ours, found = run(partial(plan.forward, *given, needs_slope=slope))
        theirs, wanted = run(partial(general, *call))
        assert ours == theirs
        loss, policy_loss, kl, _, *rest = wanted
        assert lying(found) == lying((loss, policy_loss, kl, torch.empty(()), rest[-1] if slope else None))
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
        assert lying([found]) == lying([wanted])


def refused(recorder, plan, call):
    """Hold a plan to launching nothing for what a hook of saved tensors may have put in the place of its own."""
    current, count, upstream = call.current_logps, torch.ones(()), torch.ones(())
    slope = torch.rand(current.shape)
    recorder.launches.clear()
    for saved in (
        (current.double(), count, slope, upstream),
        (current, torch.ones(2), slope, upstream),
        (current, count.double(), slope, upstream),
        (current, count, slope.double(), upstream),
        (current, count, slope.t().contiguous().t(), upstream),
        (current, count, slope[:1], upstream),
        (current, count, slope, upstream.double()),
        (current, count, slope, torch.ones(2)),
        (current, count, slope, upstream.as_subclass(Wrapper)),
        (current, count, slope, torch._neg_view(upstream)),
    ):
        assert plan.backward(*saved, overwrite=True) is None
    assert not recorder.launches


def hold(plant=nullcontext):
    torch.manual_seed(0)
    with TritonRecorder().pretended() as recorder, plant():
        backend = importlib.import_module(BACKEND)
        # Any address is one that was met before: what is compiled for another kind of tensors shows.
        importlib.import_module("rl_kernels.core.triton_lib.launch").ALIGNMENT = 1
        for name, make in CALLS.items():
            call = make()
            plan = backend.planned(call)
            assert plan is not None, name
            for other in (call, moved(call)):
                same(recorder, plan, backend, other)
            refused(recorder, plan, call)
        for name, make in UNPLANNED.items():
            assert backend.planned(make()) is None, name
        # A reference is given, and not read.
        call = made(numbers=Numbers())
        plan = backend.planned(call._replace(ref_logps=None))
        recorder.launches.clear()
        plan.forward(call.current_logps, call.old_logps, call.ref_logps, call.rewards, call.mask, needs_slope=False)
        assert recorder.launches[0]["ref"] is None


def test_launches_are_those_of_the_general_path():
    hold()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_show(bug):
    try:
        hold(partial(planted, MODULES, bug))
    except FAILURES:
        return
    pytest.fail("the launches are as they should be")


def arguments(length=5):
    torch.manual_seed(1)
    current, old, ref = (-torch.rand(4, length) for _ in range(3))
    return current, old, ref, torch.rand(4), torch.rand(4, length) < 0.8


def test_what_varies_is_looked_at_in_every_call():
    current, old, ref, rewards, mask = arguments()
    first = grpo_loss(current, old, ref, rewards, mask, samples_per_prompt=2)
    for changes in ({"beta": 0.5}, {"clip_eps": 0.01}, {"objective": Objective(eps=0.3)}, {"samples_per_prompt": 4}):
        other = grpo_loss(current, old, ref, rewards, mask, **({"samples_per_prompt": 2} | changes))
        assert not torch.equal(other.loss, first.loss), changes
    numbers = mask.to(torch.int32)
    assert torch.equal(grpo_loss(current, old, ref, rewards, numbers, samples_per_prompt=2).loss, first.loss)
    numbers[0, 0] = 2
    with pytest.raises(ValueError, match=r"^completion_mask: "):
        grpo_loss(current, old, ref, rewards, numbers, samples_per_prompt=2)
    with pytest.raises(ValueError, match=r"^samples_per_prompt: "):
        grpo_loss(current, old, ref, rewards, mask, samples_per_prompt=3)
    with pytest.raises(TypeError, match=r"^extras: "):
        grpo_loss(current, old, ref, rewards, mask, samples_per_prompt=2, extras=())
    with pytest.raises(ValueError, match=r"^ref_logps: "):
        grpo_loss_from_advantages(current, old, None, rewards, mask, beta=0.1)


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

    def planned(call):
        made.append(Fake(call))
        return made[-1]

    monkeypatch.setattr(native, "planned", planned, raising=False)
    dispatch.forget()
    yield made
    dispatch.forget()


def test_a_planned_call_gives_what_the_general_path_gives(fake):
    for function, scores in ((grpo_loss, {"samples_per_prompt": 2}), (grpo_loss_from_advantages, {})):
        given = arguments()
        leaf = given[0].clone().requires_grad_()
        found = function(leaf, *given[1:], beta=0.1, **scores)
        found.loss.backward()
        with record_dispatch():
            other = given[0].clone().requires_grad_()
            expected = function(other, *given[1:], beta=0.1, **scores)
        expected.loss.backward()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert torch.equal(leaf.grad, other.grad)
        assert [value.requires_grad for value in found] == [True, False, False]
        assert function(*given, beta=0.1, **scores).loss.requires_grad is False
        assert fake[-1].calls == ["forward with slope", "backward", "forward"]
    assert len(fake) == 2


def test_what_observes_ops_sees_those_of_the_general_path(fake):
    leaf, *rest = arguments()
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
    loss = grpo_loss(leaf, *rest, samples_per_prompt=2).loss
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()
    loss = grpo_loss(leaf, *rest, samples_per_prompt=2).loss
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(torch.tensor(1.0), torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
            torch.autograd.grad(loss, leaf, upstream)
        with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
            grpo_loss(forward_ad.make_dual(leaf.detach(), leaf.detach()), *rest, samples_per_prompt=2)
    assert fake[0].calls == ["forward with slope"] * 2


@pytest.mark.parametrize("place", range(5))
def test_classes_of_others_are_not_planned(fake, place):
    given = list(arguments())
    given[place] = given[place].as_subclass(Wrapper)
    grpo_loss(*given, samples_per_prompt=2)
    grpo_loss_from_advantages(*given)
    assert not fake
