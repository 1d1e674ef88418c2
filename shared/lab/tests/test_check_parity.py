"""Parity on a toy operator: backends beside each other, and which of them may stand beside another at all."""

import pytest
import torch

from rl_kernels.core.dispatch import AUTO
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.lab.check.candidate import backend_candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import Check


class OffGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, upstream):
        return 2.01 * upstream


def broken(x):
    raise RuntimeError("broken")


BACKENDS = {
    "twice": lambda x: 2 * x,
    "sum": lambda x: x + x,
    "last bit": lambda x: 2 * x * (1 + 2e-7),
    "off": lambda x: 2.01 * x,
    "off gradient": OffGradient.apply,
    "NaN": lambda x: 2 * x + torch.nan,
    "half": lambda x: (2 * x).half(),
    "batch": lambda x: 2 * x * (1 + 1e-6 * len(x)),
    "detached": lambda x: 2 * x.detach(),
    "broken": broken,
}


@pytest.fixture
def parity(make_module, doubled):
    """Return ``parity(candidate, backends, **promises)``: the records of a backend beside the others."""

    def double(x, *, backend=None):
        return BACKENDS[double.first if backend == AUTO else backend](x)

    make_module("toy_pkg", double=double)
    make_module("toy_pkg.spec.cases", SPEC=doubled)

    def records(candidate, backends, **promises):
        double.first = backends[0]
        made = tuple(Backend(name, "toy_pkg.x", {"cpu": promises.get(name, INVARIANT)}) for name in backends)
        operator = Operator("double", "toy_pkg", "", ("N",), frozenset({"N"}), {}, {}, made, lambda x, **_: Call.of(x))
        chosen = backend_candidate(operator, candidate, candidate, "cpu")
        return list(
            check_relation(Cell(chosen, doubled, doubled.case(), Setting("fp32", torch.device("cpu"), "cpu")), "parity")
        )

    return records


def beside(found):
    """The checks by item, and whether they hold."""
    return {record.item: record.passed for record in found if isinstance(record, Check)}


def test_backends_that_agree_to_within_the_contract_hold(parity):
    for peer in ("sum", "last bit"):
        found = beside(parity("twice", ["twice", peer]))
        assert found == {f"output beside {peer}": True, f"gradient:x beside {peer}": True}


@pytest.mark.parametrize(
    ("peer", "item", "message"),
    [
        ("off", "output", "outside the contract's fence"),
        ("off gradient", "gradient:x", "outside the contract's fence"),
        ("NaN", "output", "NaN or inf in one but not the other"),
        ("half", "output", "expected dtype torch.float16, got torch.float32"),
        ("detached", "beside detached", "output: detached"),
    ],
)
def test_a_backend_beyond_the_contract_fails(parity, peer, item, message):
    failed = {r.item: r.comparison.message for r in parity("twice", ["twice", peer]) if not r.passed}
    found = failed[item if "beside" in item else f"{item} beside {peer}"]
    assert message in found


def test_every_other_backend_is_compared(parity):
    found = beside(parity("sum", ["twice", "sum", "off"]))
    assert [item for item in found if item.startswith("output")] == ["output beside twice", "output beside off"]
    assert [found[f"output beside {name}"] for name in ("twice", "off")] == [True, False]


@pytest.mark.parametrize(
    ("peer", "promises", "reason"),
    [
        ("batch", INVARIANT, "batch is not eligible: fails invariance (alone: "),
        ("broken", INVARIANT, "broken is not eligible: fails invariance (base: forward raised RuntimeError: broken"),
        ("sum", REPEATABLE, "sum is not eligible: does not promise to be invariant on cpu"),
    ],
)
def test_a_backend_that_is_not_invariant_is_not_eligible(parity, peer, promises, reason):
    (skip,) = parity("twice", ["twice", peer], **{peer: promises})
    assert skip.reason.startswith(reason)


def test_neither_the_automatic_choice_nor_a_backend_is_compared_with_itself(parity):
    assert beside(parity(AUTO, ["twice", "sum"])).keys() == {"output beside sum", "gradient:x beside sum"}
    for candidate in (AUTO, "twice"):
        (skip,) = parity(candidate, ["twice"])
        assert skip.reason == "no other backend runs here"


def test_a_candidate_that_raises_fails(parity):
    (check,) = parity("broken", ["broken", "twice"])
    assert "forward raised RuntimeError: broken" in check.comparison.message
