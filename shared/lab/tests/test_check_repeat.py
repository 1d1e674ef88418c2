"""Many runs of one call: what changes a bit is counted, what does not is not."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.testing import Case, Draw, Spec
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import determinism
from rl_kernels.lab.check.repeat import OtherStream, differing, differing_runs, other_stream

CPU = torch.device("cpu")
ITEMS = ("output", "gradient:x")
SPEC = Spec(
    cases=(Case("plain", {"rows": 6}),),
    inputs=lambda case, draw: {"x": draw.normal(case.sizes["rows"], 5)},
    references={"": torch.tanh},
    classes={"output": "reduction", "gradient:x": "reduction"},
    differentiable=("x",),
    magnitudes=lambda case, inputs, upstream: {},
    transforms={},
    illegal=(),
)


class Script(OtherStream):
    """Is busy or not as it is told, and notes what it is asked to hold."""

    def __init__(self, *busy):
        self.busy = iter(busy)
        self.held = []

    def top_up(self, products):
        self.held.append(products)

    @property
    def is_busy(self):
        return next(self.busy)


def runs_of(function):
    candidate = Candidate("toy", SimpleNamespace(name="toy"), lambda name, inputs: function(**inputs))
    return Cell(candidate, SPEC, SPEC.cases[0], Setting("fp32", CPU, "cpu"))


class LateGradient(torch.autograd.Function):
    """The identity, whose backward is off by a bit in one element once, at the third run."""

    count = itertools.count(1)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        grad = upstream.clone()
        if next(LateGradient.count) == 3:
            grad.view(torch.int32)[0, 0] ^= 1
        return grad


def test_noise_in_the_last_bit_of_one_element_is_counted():
    assert differing_runs(runs_of(torch.tanh), 5) == {"output": 0, "gradient:x": 0}
    noisy = itertools.count()

    def function(x):
        # The first call gives the upstream gradient, the second is what the others are compared with.
        out = x.tanh()
        return torch.cat((out[:1].nextafter(torch.tensor(2.0)), out[1:])) if next(noisy) == 4 else out

    assert differing_runs(runs_of(function), 4) == {"output": 5, "gradient:x": 0}
    assert differing_runs(runs_of(lambda x: LateGradient.apply(x.tanh())), 4) == {"output": 0, "gradient:x": 1}


def test_one_run_that_differs_among_equal_ones_fails_repeatability():
    calls = itertools.count(1)
    cell = runs_of(lambda x: x.tanh() + (next(calls) == 5))
    found = {record.item: record.passed for record in determinism.repeatability(cell) if record.item in ITEMS}
    assert found == {"output": False, "gradient:x": True}


def test_a_result_that_is_missing_or_of_another_kind_differs_everywhere():
    results = iter([torch.zeros(4), None, torch.zeros(4), torch.zeros(3), torch.zeros(4).half(), -torch.zeros(4)])
    found = differing(lambda: {} if (value := next(results)) is None else {"y": value}, 6, other_stream(CPU))
    assert found == {"y": 16}
    # Equal NaN does not differ.
    assert differing(lambda: {"y": torch.tensor([torch.nan, 1.0])}, 3, other_stream(CPU)) == {"y": 0}


def test_runs_at_whose_end_the_other_stream_is_idle_do_not_count():
    script, calls = Script(True, False, False, True), itertools.count()
    assert differing(lambda: {"y": torch.tensor(next(calls) * 0)}, 3, script) == {"y": 0}
    assert script.held == [8, 8, 16, 32]
    assert next(calls) == 5
    with pytest.raises(RuntimeError, match="at the end of only 1 runs, expected 4"):
        differing(lambda: {"y": torch.zeros(1)}, 4, Script(*[False] * 12))


@pytest.mark.gpu
def test_sums_by_atomics_are_caught_on_a_gpu():
    draw = Draw(torch.float32, "cuda", seed=1)
    values, places = draw.normal(1 << 20), draw.ids(64, 1 << 20)
    assert not torch.are_deterministic_algorithms_enabled()

    def by_atomics():
        return {"y": torch.zeros(64, device="cuda").index_add_(0, places, values)}

    assert differing(by_atomics, 20, other_stream(values.device))["y"]


@pytest.mark.gpu
def test_the_other_stream_has_work_until_it_is_waited_for():
    other = OtherStream(torch.device("cuda"))
    assert not other.is_busy
    other.top_up(50)
    assert other.is_busy
    torch.cuda.synchronize()
    assert not other.is_busy
