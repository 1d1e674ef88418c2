"""Every objective in the Triton backend: three launches, packed sequences, and native's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, function_of
from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.grpo_loss.plan import FORMS
from rl_kernels.lab.check.compare import bits

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REASON = OPERATOR.backend("triton").why_not(Call.of(torch.zeros(1, device=DEVICE)))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BATCH, LENGTH = 4, 130
OF_SEQUENCES = ("grpo", "gspo", "sapo", "dr_grpo", "luspo")


def _call(loss_type: str, length: int = LENGTH, **options: Any) -> dict[str, Any]:
    draw = Draw(torch.float32, DEVICE, seed=19)
    current = draw.uniform(1e-2, 1.0, BATCH, length).log()
    old, ref = (current + draw.normal(BATCH, length, scale=scale) for scale in (0.1, 0.2))
    call = {"current_logps": current.requires_grad_(), "old_logps": old.detach(), "ref_logps": ref.detach()}
    call |= {"advantages": draw.normal(BATCH), "completion_mask": draw.mask(0.8, BATCH, length)}
    call["rollout_ratio"] = draw.uniform(0.5, 1.5, BATCH, length)
    return {**call, "loss_type": loss_type, "beta": 0.1, "kl_correction": True, **options}


def _results(call: dict[str, Any], backend: str = "triton") -> list[torch.Tensor]:
    output, metrics = grpo_loss_from_advantages(**call, backend=backend, return_metrics=True)
    return [*(value.detach() for value in output), metrics, *torch.autograd.grad(output.loss, call["current_logps"])]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", FORMS)
def test_values_are_those_of_native(loss_type: str, level: str) -> None:
    if loss_type == "gspo" and level == "token":
        pytest.skip("gspo is of sequences")
    call = _call(loss_type, importance_level=level)
    for found, expected in zip(_results(call), _results(call, "native"), strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=3e-5, atol=2e-5 * size)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("loss_type", FORMS)
def test_packed_sequences_and_padding_change_no_bit(loss_type: str, alike: bool) -> None:
    fixed = {"max_completion_length": LENGTH} if loss_type == "dr_grpo" else {}
    call = _call(loss_type, **fixed, **({"rollout_ratio": None} if alike else {}))
    *expected, grad = _results(call)
    names = ("current_logps", "old_logps", "ref_logps", "completion_mask", *(() if alike else ("rollout_ratio",)))
    ends = torch.where(call["completion_mask"], torch.arange(1, LENGTH + 1, device=DEVICE), 0).amax(1)
    inside = torch.arange(LENGTH, device=DEVICE) < ends[:, None]
    offsets = torch.cat((ends.new_zeros(1), ends.cumsum(0))).int()
    packed = {name: call[name].detach()[inside] for name in names}
    packed["current_logps"].requires_grad_()
    *found, packed_grad = _results({**call, **packed, "cu_seqlens": offsets})
    assert all(bits(a, b).passed for a, b in zip(found, expected, strict=True))
    assert bits(packed_grad, grad[inside]).passed
    wide = {name: torch.nn.functional.pad(call[name].detach(), (0, 70)) for name in names}
    wide["current_logps"].requires_grad_()
    *found, wide_grad = _results({**call, **wide})
    assert all(bits(a, b).passed for a, b in zip(found, expected, strict=True))
    assert bits(wide_grad[:, :LENGTH], grad).passed


@pytest.mark.parametrize("loss_type", ["gspo", "vespo"])
def test_expanded_advantages_have_the_bits_of_those_with_storage(loss_type: str) -> None:
    call = _call(loss_type, importance_level="sequence")
    expanded = call["advantages"][:, None].expand(BATCH, LENGTH)
    found, expected = (_results({**call, "advantages": a}) for a in (expanded, expanded.contiguous()))
    assert all(bits(a, b).passed for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("with_ratio", [False, True])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_slope_that_a_sequence_shares_is_that_of_its_tokens(kl: str, with_ratio: bool) -> None:
    call = _call("gspo", kl_estimator=kl)
    ratio = call.pop("rollout_ratio")[:, 0]
    if with_ratio:
        call["rollout_ratio"] = ratio
    per_token = call["advantages"][:, None].expand(BATCH, LENGTH).contiguous()
    # One is worked out once for a sequence, the other added up over its tokens.
    *_, once = _results(call)
    *_, summed = _results({**call, "advantages": per_token})
    torch.testing.assert_close(once, summed, rtol=1e-5, atol=1e-6 * float(summed.abs().max()))


@pytest.mark.parametrize("loss_type", ["gspo", "vespo", "cispo"])
def test_step_takes_three_launches(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernels.grpo_loss.backends.triton import backend as triton_backend
    from rl_kernels.grpo_loss.backends.triton import groups as triton_groups
    from rl_kernels.grpo_loss.backends.triton import objectives as triton_objectives

    launched, launch = [], triton_backend.launch

    def counted(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel)
        launch(kernel, *args, **options)

    for module in (triton_backend, triton_groups, triton_objectives):
        monkeypatch.setattr(module, "launch", counted)
    call = _call(loss_type)
    call["rewards"] = call.pop("advantages")
    output, _ = grpo_loss(**call, samples_per_prompt=2, backend="triton", return_metrics=True)
    torch.autograd.grad(output.loss, call["current_logps"])
    assert len(launched) == 3


class Launched(TorchDispatchMode):
    """Collects the ops inside the block that launch a kernel of their own on a GPU."""

    FREE = ("empty", "detach", "view", "slice", "select", "alias", "squeeze", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an op that is neither one of this library nor free."""
        if func.namespace != "rl_kernels" and not any(word in func.name() for word in self.FREE):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.int64, torch.int32, torch.float64, torch.bfloat16])
def test_nothing_but_the_three_kernels_is_launched(
    packed: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_kernels.grpo_loss.backends.triton import backend as triton_backend
    from rl_kernels.grpo_loss.backends.triton import objectives as triton_objectives

    call = {**_call("dapo"), "validate": False}
    if dtype is not None:
        call["num_tokens"] = torch.tensor(7, dtype=dtype, device=DEVICE)
    if packed:
        for name in ("current_logps", "old_logps", "ref_logps", "completion_mask", "rollout_ratio"):
            call[name] = call[name].detach().reshape(-1)
        call["cu_seqlens"] = torch.arange(0, BATCH * LENGTH + 1, LENGTH, device=DEVICE)
        call["max_seqlen"] = LENGTH
        call["current_logps"].requires_grad_()
    one = torch.ones((), device=DEVICE)
    expected = _results(call)[0]
    if dtype is not None:
        assert bits(_results({**call, "num_tokens": 7.0})[0], expected).passed
    for module in (triton_backend, triton_objectives):
        monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    with Launched() as ops:
        output, _ = grpo_loss_from_advantages(**call, backend="triton", return_metrics=True)
        torch.autograd.grad(output.loss, call["current_logps"], one)
    assert ops.names == []


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_segments_of_a_sequence_share_what_it_decides(
    loss_type: str, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_kernels.grpo_loss.backends.triton import objectives as triton_objectives

    call = _call(loss_type, 300, **({"rollout_ratio": None} if alike else {}))
    call["completion_mask"][0, 256:] = False
    expected = _results(call, "native")
    monkeypatch.setattr(triton_objectives, "SEGMENT", 256)
    for found, value in zip(_results(call), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=3e-5, atol=2e-5 * float(value.abs().max()))


@pytest.mark.parametrize("length", [1024, 1025])
@pytest.mark.parametrize("loss_type", ["gspo", "vespo"])
def test_sequences_in_registers_and_longer_ones(loss_type: str, length: int) -> None:
    call = _call(loss_type, length, rollout_ratio=None)
    expected = _results(call, "native")
    for found, value in zip(_results(call), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=3e-5, atol=2e-5 * float(value.abs().max()))


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_segment_without_tokens_takes_nothing_of_an_infinite_ratio(
    advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_kernels.grpo_loss.backends.triton import objectives as triton_objectives

    monkeypatch.setattr(triton_objectives, "SEGMENT", 256)
    call = _call("gspo", 300, rollout_ratio=None, kl_correction=False)
    call["old_logps"] = call["old_logps"] - 200.0
    call["completion_mask"][:, 256:] = False
    call["advantages"] = torch.full_like(call["advantages"], advantage)
    loss = grpo_loss_from_advantages(**call, backend="triton").loss
    assert loss == torch.inf if advantage < 0 else loss.isfinite()
