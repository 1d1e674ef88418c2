"""A toy operator, defined as packages define theirs. Run as a script, this file compiles it before anything else."""

import sys
import traceback
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.core import dispatch
from rl_kernels.core.calls import forget, prepared
from rl_kernels.core.dispatch import BackendUnavailable, Choice, choose, record_dispatch, use_backend
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry
from rl_kernels.core.torchlib.derivatives import apply_of, first_order, no_lost_derivatives
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define, define_check

native = ModuleType("toy_native")
native.forward = lambda a, b: a @ b
native.backward = lambda grad, b: grad @ b.t()
twice = ModuleType("toy_twice")
twice.forward = lambda a, b: 2 * (a @ b)
twice.backward = lambda grad, b: 2 * (grad @ b.t())
prepares = ModuleType("toy_prepares")
prepares.kinds = []
sys.modules |= {"toy_native": native, "toy_twice": twice, "toy_prepares": prepares}


@prepared
def _prepared_forward(a, b):
    prepares.kinds.append((a.shape, b.stride()))
    return lambda a, b: a @ b


prepares.forward = _prepared_forward

OPERATOR = Operator(
    name="toy_product",
    package=__name__,
    summary="a @ b, with a gradient to a alone",
    shape=("M", "K", "N"),
    rows=frozenset({"M"}),
    schemas={
        "forward": "(Tensor a, Tensor b, str backend) -> Tensor",
        "backward": "(Tensor grad, Tensor b, str backend) -> Tensor",
    },
    fakes={
        "forward": lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
        "backward": lambda grad, b: grad.new_empty(grad.shape[0], b.shape[0]),
    },
    backends=(
        Backend("native", "toy_native", {"cpu": INVARIANT}),
        Backend("twice", "toy_twice", {"cpu": INVARIANT}),
        Backend("prepares", "toy_prepares", {"cpu": INVARIANT}),
        Backend("gpu", "toy_gpu", {"cuda": INVARIANT}),
    ),
    describe=lambda a, b: Call.of(a, K=b.shape[0], N=b.shape[1]),
)
ops = define(OPERATOR)


def _require_positive(value, name):
    if not bool((value > 0).all()):
        raise ValueError(f"{name}: expected values > 0")


check_toy = define_check("check_toy", "(Tensor value, str name)", _require_positive)


class Subclass(torch.Tensor):
    """A user's class."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, ready):
        ctx.save_for_backward(b)
        ctx.backend = ready.backend
        return ops["forward"].call(ready, a, b)

    @staticmethod
    def backward(ctx, grad):
        return first_order(ops["backward"], grad, *ctx.saved_tensors, ctx.backend), None, None


def toy_product(a, b, backend=None):
    name = choose(OPERATOR, OPERATOR.describe(a, b), backend).name
    return _Product.apply(a, b, ops["forward"].ready(a, b, name))


def operands():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (4, 5)))
    return a.requires_grad_(), b


def test_define_registers_the_raw_ops():
    a, b = operands()
    assert set(ops) == {"forward", "backward"}
    assert ops["forward"].__name__ == "rl_kernels.toy_product_forward.default"
    assert torch.equal(ops["forward"](a, b, "native"), a @ b)
    assert torch.equal(torch.ops.rl_kernels.toy_product_backward(a @ b, b, "twice"), 2 * (a @ b) @ b.t())


def test_the_backend_that_the_last_argument_names_runs():
    a, b = operands()
    assert torch.equal(toy_product(a, b, "twice"), 2 * toy_product(a, b, "native"))
    with pytest.raises(ValueError, match="toy_product has no backend 'no_such'"):
        ops["forward"](a, b, "no_such")
    with pytest.raises(BackendUnavailable, match="cannot run on 'gpu': runs on cuda"):
        toy_product(a, b, "gpu")
    with pytest.raises(ModuleNotFoundError, match="toy_gpu"):
        ops["forward"](a, b, "gpu")


def test_launches_are_prepared_once_for_each_kind_of_arguments_whoever_calls():
    forget()
    prepares.kinds.clear()
    a, b = operands()
    shifted = torch.zeros(21, dtype=torch.float64)[1:].view(4, 5).copy_(b)
    ready = ops["forward"].ready(a, b, "prepares")
    called = [ops["forward"](a + 1, b, "prepares"), torch.ops.rl_kernels.toy_product_forward(a + 1, b, "prepares")]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        called.append(ops["forward"].call(ready, a + 1, b))
    assert "rl_kernels::toy_product_forward" in {event.key for event in profile.key_averages()}
    assert all(torch.equal(out, (a + 1) @ b) for out in [*called, ops["forward"].call(ready, a + 1, b)])
    assert len(prepares.kinds) == 1
    for other in (b.t().contiguous().t(), shifted, b[:, :2]):
        assert torch.equal(ops["forward"](a, other, "prepares"), a @ other)
    assert len(prepares.kinds) == 4
    # A subclass has an address too.
    for other in (b, shifted):
        assert torch.equal(ops["forward"](a, other.as_subclass(Subclass), "prepares"), a @ other)
    assert len(prepares.kinds) == 6
    forget()
    ops["forward"](a, b, "prepares")
    assert len(prepares.kinds) == 7
    # A wrapped tensor is left to PyTorch's dispatcher, one that outlives its transform too.
    assert ops["forward"].ready(a, b.as_subclass(Subclass), "prepares").launches is None
    wrapped = []
    torch.func.vmap(lambda x: wrapped.append(x) or x)(b[None])
    ready = ops["forward"].ready(a, wrapped[0], "prepares")
    assert ready.launches is None
    assert apply_of(_Product, ready) == _Product.apply
    ready = ops["forward"].ready(a, b, "native")
    out = apply_of(_Product, ready)(a, b, ready)
    assert torch.equal(torch.autograd.grad(out.sum(), a)[0], torch.ones_like(out) @ b.t())


def test_fake_tensors_have_the_shape_without_running_a_backend():
    with FakeTensorMode():
        out = ops["forward"](torch.empty(3, 4), torch.empty(4, 5), "gpu")
        grad = ops["backward"](torch.empty(3, 5), torch.empty(4, 5), "gpu")
    assert (out.shape, grad.shape) == ((3, 5), (3, 4))


def test_opcheck():
    a, b = (value.detach() for value in operands())
    for name, first in (("forward", a), ("backward", a @ b)):
        torch.library.opcheck(getattr(torch.ops.rl_kernels, f"toy_product_{name}").default, (first, b, "native"))


def test_autocast_does_not_reach_into_a_backend_and_is_on_after_a_failure():
    a, b = (value.detach().float() for value in operands())
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        out = toy_product(a, b)
        with pytest.raises(RuntimeError):
            toy_product(a, b[:1])
        assert torch.is_autocast_enabled("cpu")
    assert out.dtype == torch.float32
    assert torch.equal(out, a @ b)


@pytest.mark.smoke
def test_first_order_gradient():
    a, b = operands()
    assert torch.autograd.gradcheck(lambda a: toy_product(a, b), a)
    toy_product(a, b).sum().backward()
    assert torch.equal(a.grad, torch.ones(3, 5, dtype=torch.float64) @ b.t())


@pytest.mark.parametrize("upstream_needs_grad", [False, True])
def test_double_backward_raises(upstream_needs_grad):
    a, b = operands()
    upstream = torch.ones(3, 5, dtype=torch.float64, requires_grad=upstream_needs_grad)
    # A loss that is not linear in the gradient, so that a second derivative exists.
    (grad,) = torch.autograd.grad((toy_product(a, b) ** 2), a, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match=r"toy_product.backward.*double backward is not supported"):
        grad.square().sum().backward()


def test_first_order_without_gradients_in_play_is_the_op_itself(monkeypatch):
    a, b = operands()
    grad = first_order(ops["backward"], (a @ b).detach(), b, "native")
    assert not grad.requires_grad
    assert torch.equal(grad, (a @ b).detach() @ b.t())
    monkeypatch.setattr("rl_kernels.core.torchlib.derivatives._FirstOrder", None)
    with torch.no_grad():
        assert torch.equal(first_order(ops["backward"], a @ b, b, "native"), (a @ b) @ b.t())


def test_define_check_looks_at_values_where_there_are_any():
    check_toy(torch.ones(2), "x")
    with pytest.raises(ValueError, match="x: expected values > 0"):
        check_toy(torch.zeros(2), "x")
    assert check_toy(torch.zeros(2, device="meta"), "x").device.type == "meta"
    with FakeTensorMode():
        assert check_toy(torch.zeros(2), "x").shape == (0,)


def test_values_are_hidden_while_a_graph_is_captured(monkeypatch):
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert values_hidden(OnGpu())
    assert not values_hidden(torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not values_hidden(OnGpu())


def test_the_very_first_call_may_be_compiled(run_code):
    done = run_code(f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')")
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


def compile_first():
    """Compile before any eager call; see that graphs follow what is forced, and that bits and records are eager's."""

    def loss(a, b):
        assert values_hidden(b)
        return toy_product(a, b)

    a, b = operands()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with record_dispatch() as log:
        out = compiled(a, b)
    assert log == [Choice("toy_product", "native", "cpu", forced=False)], log
    out.backward(torch.ones_like(out))
    assert torch.equal(out, toy_product(a, b))
    assert torch.equal(a.grad, torch.ones_like(out) @ b.t())

    dispatch.kernel_registry = KernelRegistry({"toy_product": EntryPoint("toy_product", "toy:OPERATOR", GROUP)})
    with use_backend(toy_product="twice"):
        assert torch.equal(compiled(a, b), 2 * out)
    assert torch.equal(compiled(a, b), out)
    print("compiled")


class _Ops(TorchDispatchMode):
    """Lists the ops that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


FORWARD = "rl_kernels.toy_product_forward.default"


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_who_looks_at_ops_sees_them():
    a, b = (value.detach() for value in operands())
    with _Ops() as mode:
        ops["forward"](a, b, "native")
    assert mode.seen == [FORWARD]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops["forward"](a, b, "native")
    assert "rl_kernels::toy_product_forward" in [event.name for event in profile.events()]
    graph = make_fx(lambda a: ops["forward"](a, b, "native"))(a).graph
    assert FORWARD in [str(node.target) for node in graph.nodes]


def test_function_modes_traces_and_subclasses_see_ops_too():
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    a, b = (value.detach() for value in operands())
    seen = []
    with Functions():
        ops["forward"](a, b, "native")
    assert FORWARD in seen
    traced = torch.jit.trace(lambda a: ops["forward"](a, b, "native"), a, check_trace=False)
    assert "rl_kernels::toy_product_forward" in str(traced.graph)
    seen.clear()
    ops["forward"](a.as_subclass(Wrapped), b, "native")
    assert FORWARD in seen
    assert ops["forward"](a.to("meta"), b.to("meta"), "native").device.type == "meta"


def test_elsewhere_the_backend_is_called_as_it_is(monkeypatch, request):
    forget()
    request.addfinalizer(forget)
    called = []
    monkeypatch.setattr(native, "forward", lambda a, b: called.append(traceback.extract_stack()) or a @ b)
    a, b = (value.detach() for value in operands())
    ops["forward"](a, torch.nn.Parameter(b, requires_grad=False), "native")
    toy_product(a.requires_grad_(), b)
    for stack in called:
        assert "_ops.py" not in [Path(frame.filename).name for frame in stack]
    assert len(called) == 2


def test_gradient_transforms_are_refused_by_name():
    a, b = (x.detach() for x in operands())

    def product(a):
        no_lost_derivatives("toy_product", a, b)
        return toy_product(a, b).sum()

    with pytest.raises(
        RuntimeError, match=r"toy_product: gradients through torch\.func\.grad are not supported; torch"
    ):
        torch.func.grad(product)(a)
    with pytest.raises(RuntimeError, match="toy_product: gradients through vmap are not supported"):
        torch.func.vmap(torch.func.grad(product), in_dims=0)(a[None])
    with pytest.raises(RuntimeError, match="toy_product: gradients through vmap are not supported"):
        torch.func.vmap(torch.func.vmap(product))(a.requires_grad_()[None, None])


def test_a_second_import_in_a_process_is_refused_in_plain_words(run_code):
    code = (
        "import sys, rl_kernels.core.validate\n"
        "for name in [name for name in sys.modules if name.startswith('rl_kernels')]: del sys.modules[name]\n"
        "import rl_kernels.core.validate"
    )
    done = run_code(code)
    assert done.stderr.splitlines()[-1].startswith("ImportError: rl_kernels was imported before, and a process")


if __name__ == "__main__":
    compile_first()
