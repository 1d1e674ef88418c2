"""The Triton backend of grpo_loss: three launches, bits that no schedule changes, any size, layout and mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core import record_dispatch
from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, function_of
from rl_kernels.grpo_loss import group_advantages
from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.lab.check.compare import bits

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def _call(batch: int = 4, length: int = 7, **options: Any) -> dict[str, Any]:
    draw = Draw(torch.float32, DEVICE, seed=13)
    current = draw.uniform(1e-3, 1.0, batch, length).log()
    old, ref = ((current + draw.normal(batch, length, scale=0.3)).clamp(max=0) for _ in range(2))
    call = {
        "current_logps": current.requires_grad_(),
        "old_logps": old,
        "ref_logps": ref,
        "rewards": draw.normal(batch),
    }
    call["completion_mask"] = draw.mask(0.7, batch, length)
    return {**call, "samples_per_prompt": 2, "beta": 0.1, **options}


def _results(call: dict[str, Any]) -> list[torch.Tensor]:
    found = grpo_loss(**call, backend="triton")
    (grad,) = torch.autograd.grad(found.loss, call["current_logps"])
    return [*(value.detach() for value in found), grad]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(bits(a, b).passed for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("groups", [{}, {"samples_per_prompt": None, "group_boundaries": [0, 1, 4]}])
def test_step_takes_three_launches_and_a_forward_two(groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernels.grpo_loss.backends.triton import backend as triton_backend
    from rl_kernels.grpo_loss.backends.triton import groups as triton_groups

    launched, launch = [], triton_backend.launch

    def counted(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel)
        launch(kernel, *args, **options)

    for module in (triton_backend, triton_groups):
        monkeypatch.setattr(module, "launch", counted)
    # Nothing is planned where choices are recorded; a plan's launches are held to these in test_planned.
    with record_dispatch():
        _results(_call(**groups))
        assert len(launched) == 3
        with torch.no_grad():
            grpo_loss(**_call(**groups), backend="triton")
    assert len(launched) == 5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_profiler_sees_three_kernels_and_no_copy() -> None:
    call = _call(64, 512, samples_per_prompt=8, validate=False)
    one = torch.ones((), device="cuda")

    def step() -> None:
        torch.autograd.grad(grpo_loss(**call, backend="triton").loss, call["current_logps"], one)

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 3, kernels


@pytest.mark.gpu
def test_forward_and_backward_take_the_memory_of_one_gradient() -> None:
    call = _call(64, 4096, samples_per_prompt=8, validate=False)
    leaf = call["current_logps"]
    for _ in range(2):
        leaf.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grpo_loss(**call, backend="triton").loss.backward()
    assert leaf.nbytes <= torch.cuda.max_memory_allocated() - before < 1.1 * leaf.nbytes


@pytest.mark.parametrize("upstream", [torch.inf, torch.nan, -2.0])
def test_masked_gradient_is_zero_for_any_upstream(upstream: float) -> None:
    call = _call(4, 130)
    loss = grpo_loss(**call, backend="triton").loss
    (grad,) = torch.autograd.grad(loss, call["current_logps"], torch.tensor(upstream, device=DEVICE))
    masked = grad[~call["completion_mask"]]
    assert not masked.any()
    assert not masked.signbit().any()
    assert grad[call["completion_mask"]].isfinite().all() == (upstream == -2.0)


def test_active_token_without_a_slope_is_told_from_a_masked_one() -> None:
    # A ratio that underflows to 0 has the slope -0 A.
    current = torch.tensor([[-500.0, -1.0]], device=DEVICE, requires_grad=True)
    mask, advantages = torch.tensor([[True, False]], device=DEVICE), torch.ones(1, device=DEVICE)
    old = torch.zeros(1, 2, device=DEVICE)
    loss = grpo_loss_from_advantages(current, old, None, advantages, mask, backend="triton").loss
    (grad,) = torch.autograd.grad(loss, current, torch.tensor(torch.inf, device=DEVICE))
    assert grad.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("length", [1, 100, 129, 600])
def test_lanes_that_hold_zeros_change_no_bit(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernels.grpo_loss.backends.triton import groups as triton_groups
    from rl_kernels.grpo_loss.backends.triton import plain as triton_plain

    call, asked = _call(6, length, samples_per_prompt=3), []
    expected = _results(call)

    def most(size: int, least: int) -> int:
        asked.append(size)
        return triton_groups.LANES

    for module in (triton_plain, triton_groups):
        monkeypatch.setattr(module, "lanes_for", most)
    # Nothing is planned, and so nothing taken from a plan, where choices are recorded.
    with record_dispatch():
        found = _results(call)
    assert set(asked) == {3, length}
    assert _same(found, expected)


@pytest.mark.parametrize("sizes", [[2, 16, 17, 1, 30], [600, 3]])
def test_advantages_in_the_loss_have_the_bits_of_their_own_op(sizes: list[int]) -> None:
    boundaries = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    rewards = 100 + Draw(torch.float32, DEVICE, seed=14).normal(boundaries[-1])
    advantages = group_advantages(rewards, group_boundaries=boundaries, backend="triton")
    # On-policy, the gradient times the count is -A, and one token a sequence shows each.
    current = torch.zeros(len(rewards), 1, device=DEVICE, requires_grad=True)
    mask = torch.ones(len(rewards), 1, device=DEVICE, dtype=torch.bool)
    loss = grpo_loss(current, None, None, rewards, mask, group_boundaries=boundaries, backend="triton").loss
    (grad,) = torch.autograd.grad(loss, current, torch.tensor(float(len(rewards)), device=DEVICE))
    assert bits(grad[:, 0], 0.0 - advantages).passed


@pytest.mark.parametrize("size", [2, 5, 16, 20])
def test_size_and_boundaries_say_the_same_groups(size: int) -> None:
    call = _call(2 * size, 3, samples_per_prompt=size)
    said = {**call, "samples_per_prompt": None, "group_boundaries": [0, size, 2 * size]}
    assert _same(_results(said), _results(call))


@pytest.mark.parametrize("name", ["current_logps", "old_logps", "ref_logps", "completion_mask"])
def test_layouts_change_no_bit(name: str) -> None:
    call = _call(4, 9)
    expected = _results(call)
    value = call[name].detach()
    wide = torch.cat((value, value, value), 1)
    for other in (value.t().contiguous().t(), wide[:, 9:18], wide.repeat(1, 2).view(4, 2, 27)[:, 0, :9]):
        assert torch.equal(other, value)
        changed = {**call, name: other.requires_grad_(name == "current_logps")}
        assert _same(_results(changed), expected)


def test_one_advantage_expanded_over_its_tokens_is_read_as_one() -> None:
    call = _call(4, 9)
    del call["samples_per_prompt"]
    advantages = call.pop("rewards")
    per_token = advantages[:, None].expand(4, 9)
    losses = [
        grpo_loss_from_advantages(**call, advantages=a, backend="triton").loss
        for a in (advantages, per_token, per_token.contiguous())
    ]
    assert bits(losses[1], losses[0]).passed
    assert bits(losses[2], losses[0]).passed


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
def test_mask_of_any_dtype_is_read_as_it_is(dtype: torch.dtype) -> None:
    call = _call(4, 130)
    changed = {**call, "completion_mask": call["completion_mask"].to(dtype)}
    assert _same(_results(changed), _results(call))


def test_more_segments_than_a_grid_of_16_bits_has_tokens() -> None:
    length = 66_000
    call = _call(2, length)
    expected = _results(call)
    call["completion_mask"] = call["completion_mask"].clone()
    padded = {name: torch.nn.functional.pad(call[name].detach(), (0, 4099)) for name in ("old_logps", "ref_logps")}
    padded["completion_mask"] = torch.nn.functional.pad(call["completion_mask"], (0, 4099))
    padded["current_logps"] = torch.nn.functional.pad(call["current_logps"].detach(), (0, 4099)).requires_grad_()
    *values, grad = _results({**call, **padded})
    assert _same([*values, grad[:, :length]], expected)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_tokens_than_32_bits_count() -> None:
    batch, length = 70_000, 32_768
    current = -torch.rand(batch, length, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(batch, length, device="cuda", dtype=torch.bool)
    mask[-2:] = True
    rewards = torch.randn(batch, device="cuda")
    few = current[-2:].clone().requires_grad_()
    options = {"samples_per_prompt": 2, "beta": 0.1, "backend": "triton"}
    expected = grpo_loss(few, None, few.detach() - 0.1, rewards[-2:], mask[-2:], **options)
    (expected_grad,) = torch.autograd.grad(expected.loss, few)
    current.requires_grad_()
    ref = current.detach() - 0.1
    found = grpo_loss(current, None, ref, rewards, mask, **options)
    (grad,) = torch.autograd.grad(found.loss, current)
    assert torch.equal(grad[-2:], expected_grad)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-6)
    assert not grad[:-2].any()
