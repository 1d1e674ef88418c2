"""Properties of experts over drawn calls: routes one by one, other experts' tokens, weights' gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Case, Draw
from rl_kernels.lab.check.compare import DEVIATIONS, ulp
from rl_kernels.moe import experts, reference
from rl_kernels.moe.activations import NAMES, activate_backward
from rl_kernels.moe.op import OPERATOR
from rl_kernels.moe.spec.cases import SPEC
from rl_kernels.moe.spec.cases_dimensions import sizes
from rl_kernels.moe.spec.deviations import deviations

pytestmark = pytest.mark.smoke
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call(torch.device(DEVICE), torch.float32, "cpu", {})
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return tensors and options of a drawn call; tokens choose experts with repetition, absent ones too."""
    draw = Draw(dtype, DEVICE, seed)
    tokens, width, inner = draw.integer(1, 40), draw.integer(1, 40), draw.integer(1, 30)
    count, slots = draw.integer(1, 7), draw.integer(1, 5)
    tensors = {
        "hidden": draw.normal(tokens, width),
        "gate_up": draw.normal(count, 2 * inner, width, scale=width**-0.5),
        "down": draw.normal(count, width, inner, scale=inner**-0.5),
        "ids": torch.tensor([draw.integer(0, count + 1) for _ in range(tokens * slots)], device=DEVICE).view(-1, slots),
        "weights": draw.normal(tokens, slots, dtype=torch.float32),
        "gate_up_bias": draw.normal(count, 2 * inner),
        "down_bias": draw.normal(count, width),
    }
    activation = ("silu", "gelu_tanh", "clamped_swiglu")[seed % 3]
    return tensors, {"activation": activation, "interleaved": seed % 2 == 0}


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_output_is_the_sum_of_its_routes_alone(backend: str, dtype: torch.dtype) -> None:
    for seed in range(12 if backend == "native" else 4):
        tensors, options = drawn(seed, dtype)
        hidden, ids, weights = tensors["hidden"], tensors["ids"], tensors["weights"]
        count, ones = len(tensors["down"]), torch.ones(1, 1, device=DEVICE)
        out = experts(**tensors, **options, backend=backend)
        for token in {0, len(hidden) // 2, len(hidden) - 1}:
            total = hidden.new_zeros(hidden.shape[1], dtype=torch.float32)
            for expert, weight in zip(ids[token], weights[token], strict=True):
                if expert < count:
                    row = {"hidden": hidden[token][None], "ids": expert.view(1, 1), "weights": ones}
                    y = experts(**{**tensors, **row}, **options, backend=backend)[0]
                    total = total + weight * y.float()
            assert torch.equal(out[token], total.to(dtype)), (seed, token)


@each_backend
def test_gradients_of_an_expert_do_not_depend_on_tokens_of_others(backend: str) -> None:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    for seed in range(20, 30 if backend == "native" else 23):
        tensors, options = drawn(seed)
        upstream = torch.randn_like(tensors["hidden"])

        def gradients(rows: torch.Tensor, tensors=tensors, options=options, upstream=upstream) -> list[torch.Tensor]:
            call = {name: x[rows] if name in ("hidden", "ids", "weights") else x for name, x in tensors.items()}
            leaves = {name: call[name].clone().requires_grad_() for name in names}
            out = experts(**{**call, **leaves}, **options, backend=backend)
            return list(torch.autograd.grad(out, list(leaves.values()), upstream[rows]))

        every = gradients(torch.arange(len(tensors["hidden"]), device=DEVICE))
        for expert in range(len(tensors["down"])):
            rows = (tensors["ids"] == expert).any(1).nonzero()[:, 0]
            for name, alone, among in zip(names, gradients(rows), every, strict=True):
                assert torch.equal(alone[expert], among[expert]), (seed, expert, name)


@each_backend
def test_main_grad_continues_the_chain(backend: str) -> None:
    # At a multiple of 16 routes, and of the 64 that Triton's interpreter rounds at a time.
    draw = Draw(torch.float32, DEVICE)
    hidden, weights = draw.normal(96, 8), draw.normal(96, 1)
    ids = torch.zeros(96, 1, dtype=torch.int32, device=DEVICE)
    gate_up, down = (x.requires_grad_() for x in (draw.normal(2, 6, 8), draw.normal(2, 8, 3)))
    upstream = draw.normal(96, 8)
    whole = torch.autograd.grad(
        experts(hidden, gate_up, down, ids, weights, backend=backend), (gate_up, down), upstream
    )
    gate_up.main_grad, down.main_grad = (torch.zeros_like(x).mT.contiguous().mT for x in (gate_up, down))
    for rows in (slice(64), slice(64, None)):
        experts(hidden[rows], gate_up, down, ids[rows], weights[rows], backend=backend).backward(upstream[rows])
    assert gate_up.grad is None
    assert down.grad is None
    assert torch.equal(gate_up.main_grad, whole[0])
    assert torch.equal(down.main_grad, whole[1])


@pytest.mark.parametrize("activation", NAMES)
def test_the_gradient_of_an_activation_is_computed_in_fp32(activation: str) -> None:
    gate, up = (4 * torch.randn(3, 40, dtype=torch.bfloat16) for _ in range(2))
    dh = torch.randn(3, 40)
    wide = activate_backward(dh, gate.float(), up.float(), activation)
    assert all(map(torch.equal, activate_backward(dh, gate, up, activation), wide))


@each_backend
def test_experts_without_tokens_have_zero_gradients(backend: str) -> None:
    tensors, options = drawn(3)
    tensors["ids"].fill_(0)
    leaves = [tensors[name].requires_grad_() for name in ("gate_up", "down", "gate_up_bias", "down_bias")]
    gradients = torch.autograd.grad(experts(**tensors, **options, backend=backend).sum(), leaves)
    assert all(not gradient[1:].any() and gradient[0].any() for gradient in gradients)
    assert len(leaves[0]) > 1


@each_backend
@pytest.mark.parametrize("recompute", [False, True])
def test_backward_saves_the_first_product_and_the_order(backend: str, recompute: bool) -> None:
    draw, saved = Draw(torch.float32, DEVICE), {}
    call = SPEC.inputs(Case("memory", sizes(9, 16, 12, 4, 2), {"biases": True, "shared": True}), draw)
    own = {x.untyped_storage().data_ptr() for x in call.values() if torch.is_tensor(x)}
    call["hidden"].requires_grad_(), call["gate_up"].requires_grad_()

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        experts(**call, recompute=recompute, backend=backend)
    routes, double, count = 18, 24, 4
    assert sum(saved.values()) <= (0 if recompute else routes * double * 4 + (routes + count + 1) * 8)
    assert bool(saved) is not recompute


@pytest.mark.gpu
@each_backend
def test_most_memory_of_backward(backend: str) -> None:
    """Gradients, z and dz, and what two more products need one after the other."""
    if backend == "native":
        pytest.skip("makes copies")
    tokens, width, inner, count, slots = 1024, 512, 384, 8, 4
    case = Case("memory", sizes(tokens, width, inner, count, slots))
    call = SPEC.inputs(case, Draw(torch.bfloat16, DEVICE))
    leaves = [call[name].requires_grad_() for name in ("hidden", "gate_up", "down", "weights")]
    upstream = torch.randn_like(call["hidden"])

    def run() -> None:
        torch.autograd.grad(experts(**call, backend=backend), leaves, upstream)

    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    most = torch.cuda.max_memory_allocated() - before
    routes, size = tokens * slots, torch.bfloat16.itemsize
    row = routes * size
    kept = tokens * width * size + sum(x.nbytes for x in leaves) + 2 * row * 2 * inner
    assert most <= kept + max(row * width, row * inner * 3) + 2**20


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_rounded_steps_explain_the_errors_of_gradients_of_weights(activation: str) -> None:
    # At widths and with numbers of routes at which no absolute fence fits. A result itself is rounded once more.
    case = Case("wide", sizes(256, 512, 192, 2, 2), {"activation": activation})
    call = SPEC.inputs(case, Draw(torch.bfloat16, DEVICE))
    upstream = Draw(torch.bfloat16, DEVICE, 5).normal(256, 512)
    names = ("weights", "gate_up", "down")

    def gradients(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        wide = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in call.items()}
        wide["weights"] = call["weights"].to(max(dtype, torch.float32, key=lambda x: x.itemsize))
        leaves = {name: wide[name].requires_grad_() for name in names}
        return [x.double() for x in torch.autograd.grad(function(**wide), list(leaves.values()), upstream.to(dtype))]

    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in call.items()}
    allowed = deviations(case, wide, {"output": upstream.double()})
    golds = gradients(reference.experts, torch.float64)
    for name, value, gold in zip(names, gradients(experts, torch.bfloat16), golds, strict=True):
        deviation = allowed[f"gradient:{name}"] * torch.finfo(torch.bfloat16).eps / 12**0.5
        if name != "weights":
            deviation = (deviation.square() + ulp(gold, torch.bfloat16).square() / 12).sqrt()
        share = (value - gold) / deviation
        assert share.square().mean().sqrt().item() == pytest.approx(1, abs=0.05), name
        assert share.abs().max() < DEVIATIONS


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_backends_agree_on_blocks_of_k_and_on_each_activation(activation: str) -> None:
    """70 and 66 terms are more than a block of K has."""
    draw, found = Draw(torch.float32, DEVICE, seed=3), []
    hidden, ids = draw.normal(4, 70), torch.tensor([[0, 1], [1, 1], [1, 0], [0, 0]], device=DEVICE)
    weights = draw.uniform(0.2, 0.8, 4, 2)
    gate_up, down = draw.normal(2, 132, 70, scale=70**-0.5), draw.normal(2, 70, 66, scale=66**-0.5)
    upstream = draw.normal(4, 70)
    for backend in BACKENDS:
        leaves = [x.clone().requires_grad_() for x in (hidden, gate_up, down, weights)]
        out = experts(*leaves[:3], ids, leaves[3], activation=activation, backend=backend)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    for values in zip(*found, strict=True):
        for other in values[1:]:
            torch.testing.assert_close(other, values[0], rtol=1e-4, atol=1e-5)
