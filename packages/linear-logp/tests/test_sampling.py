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
            found = linear_logits(hidden, weight, b, backend=backend)
        assert found.logits.shape == (shape[0], shape[2])
        for chosen in (ids, ids.flip(0).int()):
            assert same(found.logp(chosen), linear_logp(hidden, weight, chosen, b, backend=backend))
        beyond = torch.where(torch.arange(shape[0], device=device) % 3 == 1, shape[2], ids)
        assert same(
            found.logp(beyond, validate=False), linear_logp(hidden, weight, beyond, b, backend=backend, validate=False)
        )
        exact = hidden.double() @ weight.double().T + (0.0 if b is None else b.double())
        # FP32 chains of D terms about 1: far closer than a rounding to BF16.
        assert (found.logits - exact).abs().max() < 2e-5
        middle = slice(shape[0] // 2, shape[0] // 2 + 1)
        alone = linear_logits(hidden[middle], weight, b, backend=backend)
        assert same(alone.logits, found.logits[middle])
        assert same(alone.logp(ids[middle]), found.logp(ids)[middle])
    check_undefined(device, backend)


def test_ids_are_checked_by_default() -> None:
    hidden, weight, _, ids = drawn(SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match=r"target_ids: expected values in \[0, 300\)"):
        linear_logits(hidden, weight).logp(ids + 300)


def check_undefined(device: str, backend: str) -> None:
    """Rows whose softmax is not defined, and one whose other logits are all -inf."""
    hidden, weight, bias, ids = drawn((4, 16, 300), torch.bfloat16, device)
    hidden[0, 3], hidden[1, 2] = torch.nan, torch.inf
    found = linear_logits(hidden, weight, backend=backend)
    assert same(found.logp(ids), linear_logp(hidden, weight, ids, backend=backend))
    assert found.logp(ids).isnan().tolist() == [True, True, False, False]
    bias[:], bias[7] = -torch.inf, 0.5
    ids[:] = torch.tensor([7, 7, 7, 8])
    found = linear_logits(hidden, weight, bias, backend=backend)
    assert same(found.logp(ids), linear_logp(hidden, weight, ids, bias, backend=backend))
    only, none = found.logp(ids)[2:].tolist()
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
    for given in (hidden, turned):
        found = linear_logits(given, weight)
        assert found.logits.shape == (*leading, 70)
        assert same(found.logp(ids), linear_logp(hidden, weight, ids))


def test_autocast() -> None:
    hidden, weight, bias, ids = drawn((5, 16, 300), torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = linear_logits(hidden, weight, bias)
        assert same(found.logp(ids), linear_logp(hidden, weight, ids, bias))
    assert same(found.logp(ids), linear_logp(hidden.bfloat16(), weight.bfloat16(), ids, bias.bfloat16()))


def test_compiled() -> None:
    hidden, weight, bias, ids = drawn((5, 16, 300), torch.float32)

    def sampled(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = linear_logits(hidden, weight, bias)
        return found.logits, found.logp(ids, validate=False)

    logits, logp = torch.compile(sampled, backend="aot_eager", fullgraph=True)(hidden)
    expected = linear_logits(hidden, weight, bias)
    assert same(logits, expected.logits)
    assert same(logp, expected.logp(ids))


def test_forward_mode_raises() -> None:
    hidden, weight, _, _ = drawn((5, 16, 300), torch.float32)
    linear_logits(hidden, weight)
    with pytest.raises(RuntimeError, match="linear_logits"):
        torch.func.jvp(lambda x: linear_logits(x, weight).logits, (hidden,), (hidden,))


def made() -> tuple[LinearLogits, torch.Tensor]:
    hidden, weight, _, ids = drawn((4, 16, 90), torch.float32)
    return linear_logits(hidden, weight), ids


def test_logits_changed_in_place_raise() -> None:
    found, ids = made()
    before = found.logp(ids)
    found.logits.clone().div_(2.0)
    assert same(found.logp(ids), before)
    assert same(copy.deepcopy(found).logp(ids), before)
    found.logits.div_(2.0)
    with pytest.raises(RuntimeError, match="logits: changed in place"):
        found.logp(ids)


def test_inference_mode() -> None:
    with torch.inference_mode():
        found, ids = made()
        assert found.seen is None
        value = found.logp(ids)
    assert same(value, made()[0].logp(ids))


def test_forced_backend_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernels.linear_logp import sampling

    asked, forward = [], sampling.ops["forward"]

    class Asked:
        def call(self, ready: Ready, *args: object) -> object:
            asked.append(ready.backend)
            return forward(*args, "native")

    monkeypatch.setitem(sampling.ops, "forward", Asked())
    monkeypatch.setattr(sampling, "_prepare", lambda *args: Ready(args[-1]))
    hidden, weight, _, _ = drawn((4, 16, 90), torch.float32)
    linear_logits(hidden, weight, backend="triton")
    assert asked == ["triton"]


@pytest.mark.smoke
def test_logp_of_gathered_logits() -> None:
    found, ids = made()
    two = torch.stack((ids, ids.flip(0)), -1)
    together = found.logp_of(found.logits.gather(1, two))
    assert same(together[:, 0], found.logp(ids))
    assert same(together[:, 1], found.logp(ids.flip(0)))
    for wrong in (found.logits[:, 0], found.logits[:2], found.logits.double()):
        with pytest.raises(ValueError, match=r"logits: expected torch\.float32 of shape"):
            found.logp_of(wrong)


def test_invalid_arguments_raise() -> None:
    found, ids = made()
    for wrong, error in ((ids[:2], ValueError), (ids.float(), TypeError), (ids.to("meta"), ValueError)):
        with pytest.raises(error, match="target_ids"):
            found.logp(wrong)
    ids[1] = 90
    with pytest.raises(ValueError, match="target_ids: expected values in"):
        found.logp(ids)
    hidden, weight, bias, _ = drawn((4, 16, 90), torch.float32)
    for given, error, match in (
        ((hidden[:, :8], weight), ValueError, "lm_head_weight"),
        ((hidden, weight, bias[:-1]), ValueError, "bias"),
        (([1.0], weight), TypeError, "hidden"),
    ):
        with pytest.raises(error, match=match):
            linear_logits(*given)
    with pytest.raises(ValueError, match="nope"):
        linear_logits(hidden, weight, backend="nope")
    for one in (hidden, weight, bias):
        one.requires_grad_()
        with pytest.raises(ValueError, match="no_grad"):
            linear_logits(hidden, weight, bias)
        with torch.no_grad():
            linear_logits(hidden, weight, bias)
        one.requires_grad_(False)
