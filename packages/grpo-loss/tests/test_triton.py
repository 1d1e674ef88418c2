"""The Triton backend of grpo_loss: memory, lanes and segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.core.calls import forget
from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, function_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.grpo_loss import group_advantages
from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.lab.check.compare import bits

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BATCH, LENGTH = 4, 130
TOKENS = ("current_logps", "old_logps", "ref_logps", "completion_mask", "rollout_ratio")
MODULES = tuple(
    f"rl_kernels.grpo_loss.backends.triton.{name}"
    for name in ("groups", "terms", "tokens", "sequence", "kernels", "reduce", "backend")
)
BUGS = (
    Bug("last tokens are not scaled", "ceil_div(size, GRADIENT_BLOCK)", "max(size // GRADIENT_BLOCK, 1)"),
    Bug("any layout of rows is read", "x.stride(1) == 1 if", "True if"),
    Bug("numbers of the first call are kept", "arguments[NUMBERS].tolist()", "call.numbers.tolist()"),
)


def _plain(batch: int = BATCH, length: int = 7, **options: Any) -> dict[str, Any]:
    """Return a call of the plain loss."""
    draw = Draw(torch.float32, DEVICE, seed=13)
    current = draw.uniform(1e-3, 1.0, batch, length).log()
    old, ref = ((current + draw.normal(batch, length, scale=0.3)).clamp(max=0) for _ in range(2))
    call = {"current_logps": current.requires_grad_(), "old_logps": old, "ref_logps": ref}
    call |= {"rewards": draw.normal(batch), "completion_mask": draw.mask(0.7, batch, length)}
    return {**call, "samples_per_prompt": 2, "beta": 0.1, **options}


def _objective(loss_type: str, length: int = LENGTH, **options: Any) -> dict[str, Any]:
    """Return a call of a loss with everything that it may take."""
    draw = Draw(torch.float32, DEVICE, seed=19)
    current = draw.uniform(1e-2, 1.0, BATCH, length).log()
    old, ref = (current + draw.normal(BATCH, length, scale=scale) for scale in (0.1, 0.2))
    call = {"current_logps": current.requires_grad_(), "old_logps": old.detach(), "ref_logps": ref.detach()}
    call |= {"advantages": draw.normal(BATCH), "completion_mask": draw.mask(0.8, BATCH, length)}
    call["rollout_ratio"] = draw.uniform(0.5, 1.5, BATCH, length)
    return {**call, "loss_type": loss_type, "beta": 0.1, "kl_correction": True, **options}


def _results(call: dict[str, Any], backend: str = "triton") -> list[torch.Tensor]:
    """Return losses, metrics of an objective, and the gradient."""
    if "rewards" in call:
        output, metrics = grpo_loss(**call, backend=backend), []
    else:
        output, *metrics = grpo_loss_from_advantages(**call, backend=backend, return_metrics=True)
    (grad,) = torch.autograd.grad(output.loss, call["current_logps"])
    return [*(value.detach() for value in output), *metrics, grad]


def _same(result: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(bits(a, b).passed for a, b in zip(result, expected, strict=True))


def _close(result: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-5, atol=2e-5 * float(other.abs().max()))


def check_host_code() -> None:
    """Compare calls of one kind with other numbers, in layouts that kernels do not read, and of many tokens."""
    apart = {name: _plain()[name].detach().t().contiguous().t() for name in TOKENS[:4]}
    apart["current_logps"].requires_grad_()
    rewards = Draw(torch.float32, DEVICE, seed=20).normal(2 * BATCH)[::2]
    calls = _plain(), _plain(beta=0.5, clip_eps=0.4), _plain(rewards=rewards), _plain(**apart), _objective("grpo", 300)
    for call in calls:
        _close(_results(call), _results(call, "native"))


def test_host_code_on_calls_of_one_kind_and_any_layout() -> None:
    check_host_code()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_shows_in_the_host_code(bug: Bug) -> None:
    with planted(MODULES, bug), pytest.raises(AssertionError):
        check_host_code()


@pytest.fixture
def prepare_anew() -> Iterator[Callable[[], None]]:
    """Return a function that forgets the prepared launches; those of the test are forgotten at its end."""
    yield forget
    forget()


class Launched(TorchDispatchMode):
    """Collects the ops inside the block that launch a kernel of their own on a GPU."""

    FREE = ("empty", "detach", "view", "slice", "select", "alias", "squeeze", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "rl_kernels" and not any(word in func.name() for word in self.FREE):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.int64, torch.int32, torch.float64, torch.bfloat16])
def test_no_op_but_our_kernels_is_launched(
    packed: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {**_objective("dapo"), "validate": False}
    if dtype is not None:
        call["num_tokens"] = torch.tensor(7, dtype=dtype, device=DEVICE)
    if packed:
        call |= {name: call[name].detach().reshape(-1) for name in TOKENS}
        call["cu_seqlens"] = torch.arange(0, BATCH * LENGTH + 1, LENGTH, device=DEVICE)
        call["max_seqlen"] = LENGTH
        call["current_logps"].requires_grad_()
    one = torch.ones((), device=DEVICE)
    expected = _results(call)[0]
    if dtype is not None:
        assert bits(_results({**call, "num_tokens": 7.0})[0], expected).passed
    monkeypatch.setattr(Launch, "__call__", lambda *args: None)
    with Launched() as ops:
        output, _ = grpo_loss_from_advantages(**call, backend="triton", return_metrics=True)
        torch.autograd.grad(output.loss, call["current_logps"], one)
    assert ops.names == []


@pytest.mark.gpu
def test_forward_and_backward_take_the_memory_of_one_gradient() -> None:
    call = _plain(64, 4096, samples_per_prompt=8, validate=False)
    leaf = call["current_logps"]
    for _ in range(2):
        leaf.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grpo_loss(**call, backend="triton").loss.backward()
    assert leaf.nbytes <= torch.cuda.max_memory_allocated() - before < 1.1 * leaf.nbytes


@pytest.mark.parametrize("length", [1, 100, 129, 600])
def test_unused_lanes_change_no_bit(
    length: int, monkeypatch: pytest.MonkeyPatch, prepare_anew: Callable[[], None]
) -> None:
    from rl_kernels.grpo_loss.backends.triton import backend, groups

    call, asked = _plain(6, length, samples_per_prompt=3), []
    expected = _results(call)
    for module in (backend, groups):
        monkeypatch.setattr(module, "lanes_for", lambda size, *_: asked.append(size) or groups.LANES)
    prepare_anew()
    result = _results(call)
    assert set(asked) == {3, length}
    assert _same(result, expected)


@pytest.mark.parametrize("sizes", [[2, 16, 17, 1, 30], [258, 3]])
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


@pytest.mark.parametrize("loss_type", ["bnpo", "gspo", "vespo"])
def test_expanded_advantages_have_the_bits_of_those_with_storage(loss_type: str) -> None:
    call = _objective(loss_type, rollout_ratio=None)
    expanded = call["advantages"][:, None].expand(BATCH, LENGTH)
    result, expected = (_results({**call, "advantages": a}) for a in (expanded, expanded.contiguous()))
    assert _same(result, expected)


@pytest.mark.parametrize("with_ratio", [False, True])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_shared_slope_is_the_sum_over_tokens(kl: str, with_ratio: bool) -> None:
    call = _objective("gspo", kl_estimator=kl)
    ratio = call.pop("rollout_ratio")[:, 0]
    if with_ratio:
        call["rollout_ratio"] = ratio
    per_token = call["advantages"][:, None].expand(BATCH, LENGTH).contiguous()
    # One is worked out once for a sequence, the other added up over its tokens.
    *_, once = _results(call)
    *_, summed = _results({**call, "advantages": per_token})
    torch.testing.assert_close(once, summed, rtol=1e-5, atol=1e-6 * float(summed.abs().max()))


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "vespo"])
def test_segments_share_values_of_their_sequence(
    loss_type: str, alike: bool, monkeypatch: pytest.MonkeyPatch, prepare_anew: Callable[[], None]
) -> None:
    from rl_kernels.grpo_loss.backends.triton import backend

    monkeypatch.setattr(backend, "SEGMENT", 256)
    prepare_anew()
    call = _objective(loss_type, 300, **({"rollout_ratio": None} if alike else {}))
    call["completion_mask"][0, 256:] = False
    _close(_results(call), _results(call, "native"))
    if loss_type == "gspo":
        # A segment without tokens takes nothing of an infinite ratio.
        call |= {"rollout_ratio": None, "kl_correction": False, "old_logps": call["old_logps"] - 200.0}
        call["completion_mask"][:, 256:] = False
        for advantage in (-1.0, 0.0, 1.0):
            advantages = torch.full_like(call["advantages"], advantage)
            loss = grpo_loss_from_advantages(**{**call, "advantages": advantages}, backend="triton").loss
            assert loss == torch.inf if advantage < 0 else loss.isfinite()


@pytest.mark.parametrize("length", [1024, 1025])
@pytest.mark.parametrize("loss_type", ["gspo", "vespo"])
def test_sequences_around_the_largest_number_of_lanes(
    loss_type: str, length: int, monkeypatch: pytest.MonkeyPatch, prepare_anew: Callable[[], None]
) -> None:
    from rl_kernels.grpo_loss.backends.triton import backend

    # One lane for the sum over sequences: a step of four lanes takes all of them.
    monkeypatch.setattr(backend, "LANES", BATCH // 4)
    prepare_anew()
    call = _objective(loss_type, length, rollout_ratio=None)
    _close(_results(call), _results(call, "native"))


def test_the_largest_and_the_least_ratio_of_a_lane() -> None:
    """Tokens 0 and 1024, 1 and 1025 have a lane in common."""
    call = _objective("grpo", 1030, rollout_ratio=None)
    for place, ratio in {0: 3.0, 1024: 2.5, 1: 0.2, 1025: 0.25}.items():
        call["old_logps"][0, place] = call["current_logps"].detach()[0, place] - torch.tensor(ratio).log()
        call["completion_mask"][0, place] = True
    _close(_results(call), _results(call, "native"))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_tokens() -> None:
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
    result = grpo_loss(current, None, ref, rewards, mask, **options)
    (grad,) = torch.autograd.grad(result.loss, current)
    assert torch.equal(grad[-2:], expected_grad)
    assert torch.allclose(result.loss, expected.loss, rtol=1e-6)
    assert not grad[:-2].any()
