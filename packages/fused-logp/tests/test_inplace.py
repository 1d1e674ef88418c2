"""What backward overwrites: autograd is told, so that nothing computes with what was there before; bad storage."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.dispatch import explain
from rl_kernels.fused_logp import fused_logp

MODIFIED = "modified by an inplace operation"
SHARED = "expected elements with storage of their own"


@pytest.fixture(params=["native", "triton"])
def backend(request):
    reasons = {verdict.backend: verdict.reason for verdict in explain("fused_logp", torch.zeros(1, 2))}
    reason = reasons[request.param]
    if reason and "asked for by name" not in reason:
        pytest.skip(reason)
    return request.param


def draw():
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    return logits.requires_grad_(), torch.arange(5)


def test_overwriting_a_saved_tensor_raises(backend):
    """A result of softmax that is given as logits, and ``out`` that is the saved result of exp."""
    leaf, ids = draw()
    out = torch.zeros(5, requires_grad=True).exp()
    fused_logp(leaf.detach(), ids, out=out.detach(), backend=backend)
    for result in (fused_logp(leaf.softmax(-1), ids, inplace_backward=True, backend=backend), out):
        loss = result.sum()
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


@pytest.mark.parametrize("overwriting", ["first", "second", "both"])
@pytest.mark.parametrize("turn", [1, -1])
def test_inplace_backward_beside_another_call(backend, overwriting, turn):
    leaf, ids = draw()
    logits = leaf * 1
    calls = [
        fused_logp(logits, ids, backend=backend, inplace_backward=overwriting in (name, "both"))
        for name in ("first", "second")
    ]
    one, other = calls[::turn]
    (expected,) = torch.autograd.grad(fused_logp(leaf, ids, backend=backend).sum(), leaf)
    (grad,) = torch.autograd.grad(one.sum(), leaf, retain_graph=True)
    assert torch.equal(grad, expected)
    was_overwritten = overwriting == "both" or (overwriting == "first") == (turn == 1)
    if was_overwritten:
        with pytest.raises(RuntimeError, match=MODIFIED):
            other.sum().backward()
    else:
        other.sum().backward()
        assert torch.equal(leaf.grad, expected)


def test_inplace_and_plain_backward_in_one_graph_raise(backend):
    leaf, ids = draw()
    logits = leaf * 1
    # The engine takes the younger node first.
    plain, overwriting = (
        fused_logp(logits, ids, inplace_backward=inplace, backend=backend) for inplace in (False, True)
    )
    with pytest.raises(RuntimeError, match=MODIFIED):
        (plain + overwriting).sum().backward()


def test_checkpoint_keeps_logits_with_another_reader(backend):
    """Autograd does not see that logits changed which hooks have saved, so they stay."""
    leaf, ids = draw()

    def loss(leaf, **options):
        logits = leaf * 1
        return logits.square().sum() + fused_logp(logits, ids, backend=backend, **options).sum()

    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    checkpoint(loss, leaf, inplace_backward=True, use_reentrant=False).backward()
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("together", [False, True])
def test_gradient_overwrites_the_logits_once(backend, together):
    logits, ids = draw()
    expected, found = (
        fused_logp(logits, ids, inplace_backward=inplace, return_stats=together, backend=backend)
        for inplace in (False, True)
    )
    (wanted,) = torch.autograd.grad(sum(expected).sum(), logits)
    loss = sum(found).sum()
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.equal(grad, wanted)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_inplace_backward_of_shared_storage_raises():
    ids = torch.zeros(5, dtype=torch.long)
    for strides in ((0, 1), (3, 1), (1, 0)):
        logits = torch.randn(64).as_strided((5, 10), strides)
        fused_logp(logits, ids)
        with pytest.raises(ValueError, match=f"inplace_backward: logits: {SHARED}"):
            fused_logp(logits, ids, inplace_backward=True)
        fused_logp(logits[:0], ids[:0], inplace_backward=True)


def test_invalid_out_raises():
    logits, ids = torch.randn(4, 5, 10), torch.zeros(4, 5, dtype=torch.long)
    for out in (torch.zeros(1).expand(4, 5), torch.zeros(64).as_strided((4, 5), (2, 1))):
        with pytest.raises(ValueError, match=f"out: {SHARED}, got strides"):
            fused_logp(logits, ids, out=out)
    out = torch.zeros(4, 5, requires_grad=True)
    for wanted in (out, out * 1):
        with pytest.raises(ValueError, match="out: expected a tensor that does not require grad"):
            fused_logp(logits, ids, out=wanted)
    with pytest.raises(ValueError, match="out: expected None when logits require grad"):
        fused_logp(logits.requires_grad_(), ids, out=torch.zeros(4, 5))
    with torch.no_grad():
        assert fused_logp(logits, ids, out=out) is out
