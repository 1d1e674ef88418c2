"""What a raw op overwrites, by its schema, autograd is told of, whatever the backend writes with."""

import sys
from types import ModuleType

import pytest
import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.torchlib.derivatives import may_overwrite
from rl_kernels.core.torchlib.ops import define


def add_into(a, out):
    # As a kernel does: PyTorch does not see it.
    out.detach().numpy()[...] += a.detach().numpy()


def add_seen(a, out):
    out += a


hidden, seen = ModuleType("toy_hidden"), ModuleType("toy_seen")
hidden.add_into = add_into
seen.add_into = add_seen
sys.modules |= {"toy_hidden": hidden, "toy_seen": seen}

OPERATOR = Operator(
    name="toy_writer",
    package=__name__,
    summary="out += a",
    shape=("N",),
    rows=frozenset({"N"}),
    schemas={"add_into": "(Tensor a, Tensor(a!) out, str backend) -> ()"},
    fakes={"add_into": lambda a, out: None},
    backends=(Backend("hidden", "toy_hidden", {"cpu": INVARIANT}), Backend("seen", "toy_seen", {"cpu": INVARIANT})),
    describe=Call.of,
)
add = define(OPERATOR)["add_into"]


@pytest.mark.parametrize("backend", ["hidden", "seen"])
def test_what_is_written_gets_a_new_version_and_what_is_read_does_not(backend):
    a, out = torch.ones(3), torch.zeros(2, 3)
    row = out[0]
    add(a, row, backend)
    assert torch.equal(out, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert a._version == 0
    assert out._version == row._version > 0


@pytest.mark.parametrize("backend", ["hidden", "seen"])
def test_prepared_calls_count_their_writes_too(backend):
    a, x = torch.ones(3), torch.zeros(3, requires_grad=True)
    y = x.exp()
    out = y.detach()
    add.call(add.ready(a, out, backend), a, out)
    assert torch.equal(out, torch.full((3,), 2.0))
    assert a._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("backend", ["hidden", "seen"])
def test_a_graph_that_saved_it_refuses_to_use_it(backend):
    x = torch.zeros(3, requires_grad=True)
    y = x.exp()
    add(torch.ones(3), y.detach(), backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensors_of_inference_mode_have_no_version_and_plain_ones_do_inside_it():
    plain = torch.zeros(3)
    for inside in (False, True):
        with torch.inference_mode():
            a, out = torch.ones(3), torch.zeros(3)
        with torch.inference_mode(inside):
            add(a, out, "hidden")
            assert torch.equal(out, a)
            before = plain._version
            add(a, plain, "hidden")
        assert plain._version > before


def test_compiled():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(a, out):
        add(a, out, "hidden")
        add(a, out, "hidden")
        return out * 2

    out = torch.zeros(3)
    assert torch.equal(twice(torch.ones(3), out), torch.full((3,), 4.0))
    assert torch.equal(out, torch.full((3,), 2.0))
    assert out._version > 0


def test_opcheck():
    torch.library.opcheck(torch.ops.rl_kernels.toy_writer_add_into.default, (torch.ones(3), torch.zeros(3), "hidden"))


def test_only_the_last_backward_pass_may_overwrite_what_was_saved():
    answers = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())
            return 2 * x.sum()

        @staticmethod
        def backward(ctx, upstream):
            (saved,) = ctx.saved_tensors
            answers.append(may_overwrite(saved))
            return 2 * upstream * torch.ones_like(saved)

    x = torch.ones(3, requires_grad=True)
    for options in ({"retain_graph": True}, {"create_graph": True}, {}):
        torch.autograd.grad(Double.apply(x), x, **options)
    torch.autograd.grad(Double.apply(x), x, torch.ones(2), is_grads_batched=True)
    with torch.inference_mode():
        foreign = torch.ones(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: foreign):
        torch.autograd.grad(Double.apply(x), x)
    assert answers == [False, False, True, False, False]
    assert not may_overwrite(x)
