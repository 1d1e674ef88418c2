"""What is fused between products: the bits of PyTorch's many launches, and where a model gets it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_kernels.models import invariant
from rl_kernels.models.fused import gate, rotary
from rl_kernels.models.fused.swaps import gated, rotary_module


def tensors(device, dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def rotated(q, k, cos, sin):
    """Return what the modeling files of transformers compute."""
    c, s, half = cos[:, None], sin[:, None], cos.shape[-1] // 2
    halves = [torch.cat((-x[..., half : 2 * half], x[..., :half]), -1) for x in (q, k)]
    turned = [x[..., : 2 * half] * c + turn * s for x, turn in zip((q, k), halves, strict=True)]
    if 2 * half == q.shape[-1]:
        return tuple(turned)
    return tuple(torch.cat((x, y[..., 2 * half :]), -1) for x, y in zip(turned, (q, k), strict=True))


@pytest.mark.parametrize(
    "layout", ["transposed", "part of a head", "one angle", "contiguous", "17 heads", "FP32", "few angles"]
)
def test_rotary_has_the_bits_of_pytorch(triton_on, triton_dtype, layout):
    heads, size = 17 if layout == "17 heads" else 4, 24 if layout == "part of a head" else 16
    shapes = (3, 7, heads, size), (3, 7, 2, size), (3, 7, 16), (3, heads, 7, 16), (3, 2, 7, 16)
    q, k, angle, of_q, of_k = tensors(triton_on, triton_dtype, *shapes)
    q, k = (x.transpose(1, 2)[..., :16] for x in (q, k))
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    if layout == "one angle":
        angle = angle[:1]
    if layout == "few angles":
        angle = angle[..., :6].contiguous()
    if layout == "FP32":
        # As under autocast; gradients come in the dtype of what was returned.
        angle, of_q, of_k = angle.float(), torch.randn_like(of_q, dtype=torch.float32), of_k.float()
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    cos, sin = angle.cos(), angle.sin()
    assert rotary.takes(*leaves, cos, sin)
    found, expected = rotary.rotary(*leaves, cos, sin), rotated(*leaves, cos, sin)
    upstream = of_q, of_k.transpose(1, 2).contiguous().transpose(1, 2)
    gradients = [torch.autograd.grad(x, leaves, upstream) for x in (found, expected)]
    for mine, theirs in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    if layout != "few angles":
        assert [x.stride() for x in found] == [x.stride() for x in expected]


def test_rotary_at_places_has_the_bits_of_rotary(triton_on, triton_dtype):
    for batch in (1, 2):
        q, k, angle = tensors(triton_on, triton_dtype, (batch, 5, 3, 16), (batch, 5, 2, 16), (40, 16))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        # Parts of wider tables, and every second of more places.
        cos, sin = (torch.cat((x, x), -1)[:, :16] for x in (angle.cos(), angle.sin()))
        places = torch.tensor([39, 0, 7, 7, 21, 3, 4, 5, 6, 38][: 5 * batch], device=triton_on)
        places = places.repeat_interleave(2)[::2]
        turns = [x[places].view(batch, 5, 16) for x in (cos, sin)]
        for mine, theirs in zip(rotary.rotary_at(q, k, cos, sin, places), rotary.rotary(q, k, *turns), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("shape", [(1,), (3, 1000), (2, 5, 1024)], ids=str)
def test_the_gate_has_the_bits_of_pytorch(triton_on, triton_dtype, shape):
    left, right, upstream = tensors(triton_on, triton_dtype, shape, shape, shape)
    left.view(-1)[0] = -100
    leaves = [x.requires_grad_() for x in (left, right)]
    assert gate.takes(*leaves)
    found, expected = gate.silu_mul(*leaves), F.silu(left) * right
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, leaves, upstream)),
        strict=True,
    )
    for mine, theirs in pairs:
        # On a CPU PyTorch has another exponential.
        near = 4 * torch.finfo(triton_dtype).eps if triton_on.type == "cpu" else 0.0
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
    halves = gate.silu_mul_of_halves(torch.cat((left, right), -1).detach())
    assert halves.shape == found.shape
    assert torch.equal(halves, found.detach())


def upstreams(shape, device):
    """Yield gradients as ops hand them on: expanded, transposed, cut out of a larger one."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device)
    yield "expanded", whole[:1, :1, :1, :1].expand(shape)
    yield "transposed", whole.mT.contiguous().mT
    yield "negated", torch._neg_view(whole)
    yield "cut", torch.cat((whole, whole), -1)[..., 3 : 3 + shape[-1]]


def test_gradients_come_in_any_layout(triton_on):
    q, k, angle, left, right = tensors(
        triton_on, torch.float32, (3, 4, 7, 16), (3, 2, 7, 16), (3, 7, 16), (2, 3, 5, 8), (2, 3, 5, 8)
    )
    q, k, left, right = (x.requires_grad_() for x in (q, k, left, right))
    cos, sin = angle.cos(), angle.sin()
    for (_, of_q), (_, of_k) in zip(upstreams(q.shape, triton_on), upstreams(k.shape, triton_on), strict=True):
        found = torch.autograd.grad(rotary.rotary(q, k, cos, sin), (q, k), (of_q, of_k))
        expected = torch.autograd.grad(rotated(q, k, cos, sin), (q, k), (of_q, of_k))
        assert [torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)] == [True, True]
    for _, grad in upstreams(left.shape, triton_on):
        found = torch.autograd.grad(gate.silu_mul(left, right), (left, right), grad)
        expected = torch.autograd.grad(F.silu(left) * right, (left, right), grad)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_who_takes_part_in_ops_gets_them(triton_on):
    """Modes, transforms and tracers see PyTorch's ops, and derivatives are not lost."""
    q, k, angle, left = tensors(triton_on, torch.float32, (3, 4, 7, 16), (3, 2, 7, 16), (3, 7, 16), (4, 4))
    taken = []

    def asked(x, y):
        taken.extend((rotary.takes(x, k, angle, angle), gate.takes(y, y)))
        return y

    asked(q, left)
    assert taken == [True, True]
    taken.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        asked(q, left)
    torch.func.vmap(lambda y: asked(q, y))(left)
    torch.jit.trace(lambda y: asked(q, y) * 1, left, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        asked(q, torch.autograd.forward_ad.make_dual(left, left))
    assert len(taken) >= 8
    assert not any(taken)


def test_what_does_not_fit_is_left_to_pytorch(device):
    q, k, angle = tensors(device, torch.float32, (3, 4, 7, 16), (3, 2, 7, 16), (3, 7, 16))
    others = {
        "dims": (q[0], k, angle, angle),
        "dtype": (q.double(), k.double(), angle.double(), angle.double()),
        "mixed": (q.half(), k, angle, angle),
        "angles elsewhere": (q, k, angle.to("meta"), angle.to("meta")),
        "mixed angles": (q, k, angle, angle.half()),
        "narrow angles": (q, k, angle.half(), angle.half()),
        "other halves": (q.half(), k.half(), angle.bfloat16(), angle.bfloat16()),
        "no tensor": (q, k, angle, None),
        "tokens": (q, k[:, :, :6], angle, angle),
        "batch": (q, k, angle[:2], angle[:2]),
        "odd": (q[..., :15], k[..., :15], angle[..., :15], angle[..., :15]),
        "nothing": (q[:0], k[:0], angle[:0], angle[:0]),
        "trained": (q, k, angle.clone().requires_grad_(), angle),
        "trained sine": (q, k, angle, angle.clone().requires_grad_()),
        "sine of other strides": (q, k, angle, angle.mT.contiguous().mT),
        "apart": (q.mT.contiguous().mT, k, angle, angle),
    }
    assert [name for name, given in others.items() if rotary.takes(*given)] == []
    assert not gate.takes(q, q[:2])
    square = q.new_ones(4, 4)
    pairs = (square, square.mT.contiguous().mT), (q.mT, q.mT), (q.double(), q.double()), (q[:0], q[:0])
    assert not any(gate.takes(*pair) for pair in pairs)


def test_which_models_get_it(tiny):
    for name, fused in (("Llama", True), ("Qwen3", True), ("Gemma2", False), ("Phi", False)):
        model = tiny(name, **({"head_dim": 16} if name in ("Qwen3", "Gemma2") else {}))
        assert rotary_module(model) is not None
        assert any(gated(module) for module in model.modules()) == fused, name


def test_the_function_of_a_modeling_file_comes_back(tiny):
    """After the last of several models; and what another library puts there stays."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    original = modeling.apply_rotary_pos_emb
    one, two = tiny(), tiny()
    first, second = invariant(one), invariant(two)
    assert modeling.apply_rotary_pos_emb is not original
    first.undo()
    assert modeling.apply_rotary_pos_emb is not original
    second.undo()
    assert modeling.apply_rotary_pos_emb is original
    with invariant(tiny()):
        modeling.apply_rotary_pos_emb = theirs = lambda *given: original(*given)
    try:
        assert modeling.apply_rotary_pos_emb is theirs
    finally:
        modeling.apply_rotary_pos_emb = original


@pytest.mark.parametrize(("name", "dtype"), [("Llama", torch.float32), ("Olmo2", torch.float16)])
def test_other_calls_go_to_the_function_of_the_file(tiny, device, name, dtype):
    """Angles in FP32 give the dtype that it gives, and arguments mean what they mean there."""
    modeling = pytest.importorskip(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    q, k, angle = tensors(device, torch.float32, (2, 4, 4, 16), (2, 4, 4, 16), (2, 4, 16))
    given = q.half(), k.half(), angle.cos(), angle.sin()
    expected = modeling.apply_rotary_pos_emb(*given), modeling.apply_rotary_pos_emb(q, k, *given[2:], unsqueeze_dim=2)
    with invariant(tiny(name)):
        found = modeling.apply_rotary_pos_emb(*given), modeling.apply_rotary_pos_emb(q, k, *given[2:], unsqueeze_dim=2)
    assert [x.dtype for x in found[0]] == [dtype, dtype]
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


HOOKS = {
    "forward": lambda module, called: module.register_forward_hook(lambda *_: called.append(1)),
    "forward pre": lambda module, called: module.register_forward_pre_hook(lambda *_: called.append(1)),
    "backward": lambda module, called: module.register_full_backward_hook(lambda *_: called.append(1)),
    "backward pre": lambda module, called: module.register_full_backward_pre_hook(lambda *_: called.append(1)),
    "global": lambda module, called: nn.modules.module.register_module_forward_hook(
        lambda hooked, *_: called.append(1) if hooked is module else None
    ),
}


def test_a_hook_on_the_activation_is_called(tiny, device):
    model, called = tiny(device=device), []
    with invariant(model):
        mlp = model.model.layers[0].mlp
        for kind, hook in HOOKS.items():
            called.clear()
            handle = hook(mlp.act_fn, called)
            try:
                mlp(torch.ones(1, 32, device=device)).sum().backward()
            finally:
                handle.remove()
            assert called, kind


def test_another_activation_is_computed_as_it_is(tiny, device):
    class Louder(nn.SiLU):
        def forward(self, x):
            return 2 * super().forward(x)

    model, x = tiny(device=device), torch.ones(1, 32, device=device)
    mlp = model.model.layers[0].mlp
    with invariant(model), torch.no_grad():
        mlp.act_fn = Louder()
        expected = mlp.down_proj(Louder()(mlp.gate_proj(x)) * mlp.up_proj(x))
        torch.testing.assert_close(mlp(x), expected)
    assert gated(mlp) is None


def test_second_derivatives_are_refused(triton_on):
    """Loudly also where they are asked for by ``torch.autograd.grad``."""
    q, k, angle, left = tensors(triton_on, torch.float32, (3, 4, 7, 16), (3, 2, 7, 16), (3, 7, 16), (4, 4))
    q, k, left = (x.requires_grad_() for x in (q, k, left))
    for loss, leaf in (
        (rotary.rotary(q, k, angle.cos(), angle.sin())[0].square().sum(), q),
        (gate.silu_mul(left, left).square().sum(), left),
    ):
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            torch.autograd.grad(first.square().sum() + loss, leaf)
