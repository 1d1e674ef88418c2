"""The mode of batch_invariant_ops: on, off and nested, our own operators inside of it, and integers."""

import threading

import pytest
import torch

import rl_kernels.models.clients.batch_invariant_ops as batch_invariant_ops
from rl_kernels.attention import det_attention
from rl_kernels.core import products
from rl_kernels.core.testing import Draw
from rl_kernels.core.torchlib.ops import as_native, within_native
from rl_kernels.det_gemm import det_gemm, det_linear
from rl_kernels.linear_logp import linear_logp
from rl_kernels.models.clients.batch_invariant_ops import mode
from rl_kernels.models.clients.batch_invariant_ops.mode import OPS

set_mode = batch_invariant_ops.set_batch_invariant_mode
is_on = batch_invariant_ops.is_batch_invariant_mode_enabled


@pytest.fixture(autouse=True)
def off_again():
    yield
    batch_invariant_ops.disable_batch_invariant_mode()


def draw(*shape, seed=0):
    return Draw(torch.float32, seed=seed).normal(*shape)


def kernels():
    """Return the kernel of each op for each device, by where it was registered."""
    found = {}
    for name in OPS:
        for key in ("CPU", "CUDA"):
            try:
                found[name, key] = str(torch.library.get_kernel(f"aten::{name}", key))
            except RuntimeError:
                found[name, key] = "none"
    return found


def test_on_and_off_leave_pytorch_as_it_was():
    x, w = draw(3, 40), draw(40, 30, seed=1)
    ops = (torch.mm, lambda a, b: torch.addmm(b[0], a, b), lambda a, b: torch.bmm(a[None], b[None]))
    rows = (lambda a, b: a.log_softmax(-1), lambda a, b: a.mean(-1))
    before, bits = kernels(), [op(x, w) for op in (*ops, *rows)]
    assert not is_on()
    for _ in range(2):
        batch_invariant_ops.enable_batch_invariant_mode()
        batch_invariant_ops.enable_batch_invariant_mode()
        assert is_on()
        assert not any(now == before[place] for place, now in kernels().items())
        assert torch.equal(x @ w, det_gemm(x, w))
        batch_invariant_ops.disable_batch_invariant_mode()
        batch_invariant_ops.disable_batch_invariant_mode()
        assert not is_on()
        assert kernels() == before
        assert all(torch.equal(op(x, w), was) for op, was in zip((*ops, *rows), bits, strict=True))


def test_blocks_nest_and_give_back_what_was():
    before = kernels()
    with set_mode():
        inside = is_on()
        with set_mode():
            assert is_on()
        assert is_on()
        with set_mode(False):
            assert not is_on()
            assert kernels() == before
            with pytest.raises(KeyError), set_mode():
                raise KeyError
            assert not is_on()
            batch_invariant_ops.enable_batch_invariant_mode()
        assert is_on()
        batch_invariant_ops.disable_batch_invariant_mode()
    assert inside
    assert not is_on()
    with pytest.raises(KeyError), set_mode():
        raise KeyError
    assert not is_on()
    assert kernels() == before
    batch_invariant_ops.enable_batch_invariant_mode()
    with set_mode(False):
        pass
    assert is_on()


def test_bmm_can_be_left_to_pytorch():
    before = kernels()

    def is_left():
        left = {name for (name, key), now in kernels().items() if now == before[name, key]}
        return left == {"bmm", "bmm.out", "bmm.dtype", "bmm.dtype_out"}

    batch_invariant_ops.enable_batch_invariant_mode(enable_bmm=False)
    assert is_left()
    batch_invariant_ops.enable_batch_invariant_mode()
    assert is_left()
    with set_mode(False):
        pass
    assert is_left()
    with set_mode(False):
        batch_invariant_ops.enable_batch_invariant_mode()
    assert is_left()


def test_an_op_that_cannot_be_taken_leaves_all_as_they_were(monkeypatch):
    before = kernels()
    monkeypatch.setattr(mode, "_stock", lambda name, _: {"mm": None}[name])
    with pytest.raises(KeyError) as error:
        batch_invariant_ops.enable_batch_invariant_mode()
    # Whoever keeps the error keeps the frame that it left.
    assert kernels() == before, error
    assert not is_on()


def test_our_own_operators_give_the_bits_that_they_give_outside(monkeypatch):
    """Nothing of them comes back here; what autograd calls does once, in its own dtype and with gradients off."""
    seen = []

    def watched(ours):
        def run(*args, **options):
            seen.append((args[0].dtype, torch.is_grad_enabled()))
            return ours(*args, **options)

        return run

    for name, ours in OPS.items():
        monkeypatch.setitem(OPS, name, watched(ours))
    x, w, bias = draw(70, 40), draw(48, 40, seed=1), draw(48, seed=2)
    ids, heads = torch.arange(70) % 48, draw(1, 9, 2, 16, seed=3)
    left, right = x[:64].double(), w.double()

    def run():
        value, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        out, logp = det_linear(value, weight, bias), linear_logp(value, weight, ids)
        (out.square().sum() + logp.sum()).backward()
        own = det_attention(heads, heads, heads, causal=True), det_gemm(x, w.t(), backend="native")
        return [out, logp, value.grad, weight.grad, *own]

    outside, product = run(), products.matmul(left, right.t())
    with set_mode():
        assert all(torch.equal(*pair) for pair in zip(run(), outside, strict=True))
        assert seen == []
        assert torch.equal(products.matmul(left, right.t()), product)
        assert torch.equal(left @ right.t(), product)
        seen.clear()
        x.requires_grad_() @ w.t()
    assert seen == [(torch.float32, False)]


def test_what_runs_within_a_native_backend_sees_the_ops_of_pytorch():
    """In its thread alone, and after an exception no more."""
    x, w = draw(3, 40), draw(40, 30, seed=1)
    stock, seen = x @ w, []
    mine = det_gemm(x, w)
    assert not within_native()

    def other_thread():
        seen.append((within_native(), torch.equal(x @ w, mine)))

    def kernel():
        assert within_native()
        assert torch.equal(x @ w, stock)
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        raise KeyError

    with set_mode():
        with pytest.raises(KeyError):
            as_native(kernel)
        assert not within_native()
        assert torch.equal(x @ w, mine)
    assert seen == [(False, True)]


def test_without_gradients():
    x, w = draw(5, 12), draw(12, 7, seed=1)
    for context in (torch.no_grad, torch.inference_mode):
        with set_mode(), context():
            found = (x @ w).log_softmax(-1)
            assert torch.equal(torch.addmm(w[0], x[:, :], w), det_linear(x, w.t(), w[0]))
            assert not found.requires_grad
            assert torch.equal((x[2:3] @ w).log_softmax(-1).mean(1), found.mean(1)[2:3])


def test_a_compiled_graph_calls_the_kernels_of_the_moment():
    x, w = draw(5, 12), draw(12, 7, seed=1)
    graph = torch.compile(lambda a: (a @ w).log_softmax(-1).mean(-1), backend="aot_eager")
    with set_mode():
        assert torch.equal(graph(x)[2:3], graph(x[2:3]))
        assert torch.equal(graph(x), (x @ w).log_softmax(-1).mean(-1))


def test_integers_are_left_to_pytorch():
    a = torch.arange(12).reshape(3, 4)
    expected = a @ a.t()
    with set_mode():
        assert torch.equal(a @ a.t(), expected)
        assert torch.equal(torch.addmm(expected, a, a.t(), alpha=2), 3 * expected)
        assert torch.equal(torch.bmm(a[None], a.t()[None])[0], expected)
        assert torch.equal(torch.mm(a, a.t(), out=torch.zeros_like(expected)), expected)


def test_autocast_has_cast_before_or_not_at_all():
    a, b, bias = torch.randn(5, 8), torch.randn(8, 7), torch.randn(7)
    found = torch.empty(5, 7)
    with batch_invariant_ops.set_batch_invariant_mode(), torch.autocast("cpu", torch.bfloat16):
        torch.addmm(bias, a, b, out=found)
        assert torch.nn.functional.linear(a, b.t(), bias).dtype == torch.bfloat16
    assert torch.equal(found, batch_invariant_ops.matmul_persistent(a, b, bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, batch_invariant_ops.matmul_persistent(a, b, bias))
