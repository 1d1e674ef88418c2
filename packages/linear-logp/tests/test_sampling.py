"""Logits to sample from, and the log-probabilities of what was sampled, have the bits of linear_logp."""

from __future__ import annotations

import copy

import pytest
import torch

from rl_kernels.core.calls import Ready
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.linear_logp import LinearLogits, linear_logits, linear_logp

SHAPES = ((1, 64, 300), (63, 72, 1025), (64, 128, 5003), (65, 64, 2048), (4096, 8, 257), (300, 64, 16500))
"""In FP32 the last but one takes 5 MiB without the padding to 512 columns, 8 with it."""


def drawn(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden, weight, bias and ids."""
    (rows, size, vocab), draw = shape, Draw(dtype, seed=3, device=device)
    weight = draw.normal(vocab, size, scale=size**-0.5)
    return draw.normal(rows, size), weight, draw.normal(vocab), draw.ids(vocab, rows)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def check_case(shape: tuple[int, int, int], dtype: torch.dtype, device: str, backend: str) -> None:
    hidden, weight, bias, ids = drawn(shape, dtype, device)
    for b in (None, bias):
        with torch.no_grad():
            result = linear_logits(hidden, weight, b, backend=backend)
        assert result.logits.shape == (shape[0], shape[2])
        for chosen in (ids, ids.flip(0).int()):
            assert same(result.logp(chosen), linear_logp(hidden, weight, chosen, b, backend=backend))
        beyond = torch.where(torch.arange(shape[0], device=device) % 3 == 1, shape[2], ids)
        assert same(
            result.logp(beyond, validate=False), linear_logp(hidden, weight, beyond, b, backend=backend, validate=False)
        )
        exact = hidden.double() @ weight.double().T + (0.0 if b is None else b.double())
        # FP32 chains of D terms about 1: far closer than a rounding to BF16.
        assert (result.logits - exact).abs().max() < 2e-5
        middle = slice(shape[0] // 2, shape[0] // 2 + 1)
        alone = linear_logits(hidden[middle], weight, b, backend=backend)
        assert same(alone.logits, result.logits[middle])
        assert same(alone.logp(ids[middle]), result.logp(ids)[middle])
    check_undefined(device, backend)


def test_ids_are_checked_by_default() -> None:
    hidden, weight, _, ids = drawn(SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match=r"target_ids: expected values in \[0, 300\)"):
        linear_logits(hidden, weight).logp(ids + 300)


def check_undefined(device: str, backend: str) -> None:
    """Rows whose softmax is not defined, and one whose other logits are all -inf."""
    hidden, weight, bias, ids = drawn((4, 16, 300), torch.bfloat16, device)
    hidden[0, 3], hidden[1, 2] = torch.nan, torch.inf
    result = linear_logits(hidden, weight, backend=backend)
    assert same(result.logp(ids), linear_logp(hidden, weight, ids, backend=backend))
    assert result.logp(ids).isnan().tolist() == [True, True, False, False]
    bias[:], bias[7] = -torch.inf, 0.5
    ids[:] = torch.tensor([7, 7, 7, 8])
    result = linear_logits(hidden, weight, bias, backend=backend)
    assert same(result.logp(ids), linear_logp(hidden, weight, ids, bias, backend=backend))
    only, none = result.logp(ids)[2:].tolist()
    assert abs(only) < 1e-6
    assert none == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_log_probabilities_have_the_bits_of_linear_logp(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_case(shape, dtype, "cpu", "native")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_probabilities_on_a_gpu(gpu_backend: str, shape: tuple[int, int, int]) -> None:
    check_case(shape, torch.bfloat16, "cuda", gpu_backend)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 0)], ids=str)
def test_any_leading_dims(leading: tuple[int, ...]) -> None:
    draw = Draw(torch.bfloat16)
    hidden, weight, ids = draw.normal(*leading, 16), draw.normal(70, 16), draw.ids(70, *leading)
    turned = hidden.permute(*reversed(range(hidden.ndim))).contiguous().permute(*reversed(range(hidden.ndim)))
    for arguments in (hidden, turned):
        result = linear_logits(arguments, weight)
        assert result.logits.shape == (*leading, 70)
        assert same(result.logp(ids), linear_logp(hidden, weight, ids))


def test_autocast_has_the_bits_of_cast_operands() -> None:
    hidden, weight, bias, ids = drawn((5, 16, 300), torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        result = linear_logits(hidden, weight, bias)
        assert same(result.logp(ids), linear_logp(hidden, weight, ids, bias))
    assert same(result.logp(ids), linear_logp(hidden.bfloat16(), weight.bfloat16(), ids, bias.bfloat16()))


def test_compiled_in_one_graph() -> None:
    hidden, weight, bias, ids = drawn((5, 16, 300), torch.float32)

    def sampled(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = linear_logits(hidden, weight, bias)
        return result.logits, result.logp(ids, validate=False)

    logits, logp = torch.compile(sampled, backend="aot_eager", fullgraph=True)(hidden)
    expected = linear_logits(hidden, weight, bias)
    assert same(logits, expected.logits)
    assert same(logp, expected.logp(ids))


def test_forward_mode_raises() -> None:
    hidden, weight, _, _ = drawn((5, 16, 300), torch.float32)
    linear_logits(hidden, weight)
    with pytest.raises(RuntimeError, match="linear_logits"):
        torch.func.jvp(lambda x: linear_logits(x, weight).logits, (hidden,), (hidden,))


def logits_and_ids() -> tuple[LinearLogits, torch.Tensor]:
    hidden, weight, _, ids = drawn((4, 16, 90), torch.float32)
    return linear_logits(hidden, weight), ids


def test_logits_changed_in_place_raise() -> None:
    result, ids = logits_and_ids()
    before = result.logp(ids)
    result.logits.clone().div_(2.0)
    assert same(result.logp(ids), before)
    assert same(copy.deepcopy(result).logp(ids), before)
    result.logits.div_(2.0)
    with pytest.raises(RuntimeError, match="logits: changed in place"):
        result.logp(ids)


def test_inference_mode_has_no_version_and_the_same_bits() -> None:
    with torch.inference_mode():
        result, ids = logits_and_ids()
        assert result.version is None
        value = result.logp(ids)
    assert same(value, logits_and_ids()[0].logp(ids))


def test_forced_backend_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernels.linear_logp import sampling

    asked, forward = [], sampling.ops["forward"]

    class Asked:
        def call(self, ready: Ready, *args: object) -> object:
            asked.append(ready.backend)
            return forward(*args, "native")

    monkeypatch.setitem(sampling.ops, "forward", Asked())
    monkeypatch.setattr(sampling, "_prepare", lambda *args: (Ready(args[-1]), None, None))
    hidden, weight, _, _ = drawn((4, 16, 90), torch.float32)
    linear_logits(hidden, weight, backend="triton")
    assert asked == ["triton"]


@pytest.mark.smoke
def test_logp_of_gathered_logits() -> None:
    result, ids = logits_and_ids()
    two = torch.stack((ids, ids.flip(0)), -1)
    together = result.logp_of(result.logits.gather(1, two))
    assert same(together[:, 0], result.logp(ids))
    assert same(together[:, 1], result.logp(ids.flip(0)))
    for wrong in (result.logits[:, 0], result.logits[:2], result.logits.double()):
        with pytest.raises(ValueError, match=r"logits: expected torch\.float32 of shape"):
            result.logp_of(wrong)


def test_invalid_arguments_raise() -> None:
    result, ids = logits_and_ids()
    for wrong, error in ((ids[:2], ValueError), (ids.float(), TypeError), (ids.to("meta"), ValueError)):
        with pytest.raises(error, match="target_ids"):
            result.logp(wrong)
    ids[1] = 90
    with pytest.raises(ValueError, match="target_ids: expected values in"):
        result.logp(ids)
    hidden, weight, bias, _ = drawn((4, 16, 90), torch.float32)
    for arguments, error, match in (
        ((hidden[:, :8], weight), ValueError, "lm_head_weight"),
        ((hidden, weight, bias[:-1]), ValueError, "bias"),
        (([1.0], weight), TypeError, "hidden"),
    ):
        with pytest.raises(error, match=match):
            linear_logits(*arguments)
    with pytest.raises(ValueError, match="nope"):
        linear_logits(hidden, weight, backend="nope")
    for one in (hidden, weight, bias):
        one.requires_grad_()
        with pytest.raises(ValueError, match="no_grad"):
            linear_logits(hidden, weight, bias)
        with torch.no_grad():
            linear_logits(hidden, weight, bias)
        one.requires_grad_(False)


def test_ids_are_remembered_for_few_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a captured graph has no values outside of it, and many rows would fill the memory."""
    from rl_kernels.linear_logp import sampling

    hidden, weight, _, _ = drawn((sampling.REMEMBERED, 4, 90), torch.float32)
    rest = sampling._prepare(hidden, weight, None, 0.0, None)[-1]
    assert sampling._prepare(hidden, weight, None, 0.0, None)[-1] is rest
    assert rest[0].tolist() == [0] * sampling.REMEMBERED
    assert sampling._prepare(hidden.repeat(2, 1), weight, None, 0.0, None)[-1] is None
    monkeypatch.setattr(sampling, "values_hidden", lambda value: True)
    assert sampling._prepare(hidden[1:], weight, None, 0.0, None)[-1] is None
    assert linear_logits(hidden[1:], weight).logits.shape == (sampling.REMEMBERED - 1, 90)
