"""How many logits are kept from forward to backward changes no bit of any result or gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.linear_logp import linear_logp

IGNORED = -100
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_index": IGNORED, "return_stats": True},
    {"softcap": 15.0, "temperature": 0.7, "bias": True},
    {"bias": True, "vocab_segments": 8, "ignore_index": IGNORED, "return_stats": True, "main_grad": True},
    {"workspace_mib": 1, "main_grad": True},
)
SHAPES = ((1, 64, 300), (63, 72, 1025), (130, 128, 5003), (700, 64, 16500))


def results(
    shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype, device: str, **more: Any
) -> list[torch.Tensor]:
    """Return the results and gradients of a call."""
    options, (rows, size, vocab) = dict(options), shape
    draw = Draw(dtype, seed=5, device=device)
    hidden, weight = draw.normal(rows, size).requires_grad_(), draw.normal(vocab, size, scale=size**-0.5)
    weight.requires_grad_()
    bias = draw.normal(vocab).requires_grad_() if options.pop("bias", False) else None
    ids = draw.ids(vocab, rows)
    if "ignore_index" in options:
        ids[::3] = IGNORED
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if options.pop("main_grad", False) and wide == torch.float32:
        weight.main_grad = torch.ones(vocab, size, device=device)
    found = linear_logp(hidden, weight, ids, bias, **options, **more)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    upstream = [draw.normal(rows, dtype=wide) for _ in outputs]
    torch.autograd.backward(outputs, upstream, retain_graph=True)
    first = hidden.grad.clone()
    # A second pass reads the same logits.
    torch.autograd.backward(outputs, upstream)
    gradients = [hidden.grad, weight.grad, getattr(weight, "main_grad", None), None if bias is None else bias.grad]
    return [*(value.detach() for value in outputs), first, *(value for value in gradients if value is not None)]


def hold(shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype, device: str, backend: str) -> None:
    plain = results(shape, options, dtype, device, backend=backend)
    for saved_mib in (1, 3, 4096):
        kept = results(shape, options, dtype, device, backend=backend, saved_mib=saved_mib)
        for one, other in zip(kept, plain, strict=True):
            assert torch.equal(bits_of(one), bits_of(other)), saved_mib


@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((options, torch.float32) for options in OPTIONS), (OPTIONS[3], torch.bfloat16), (OPTIONS[2], torch.float64)],
    ids=str,
)
def test_kept_logits_change_no_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    hold((300, 8, 2300), options, dtype, "cpu", "native")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["cuda-sm90", "triton"])
def test_kept_logits_change_no_bit_on_a_gpu(backend: str, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    if backend == "cuda-sm90" and torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")
    hold(shape, options, torch.bfloat16, "cuda", backend)


def test_nothing_is_kept_without_gradients() -> None:
    draw = Draw(torch.float32)
    hidden, weight, ids = draw.normal(9, 8), draw.normal(50, 8), draw.ids(50, 9)
    wanted = linear_logp(hidden, weight, ids)
    assert torch.equal(linear_logp(hidden, weight, ids, saved_mib=4), wanted)
    out = linear_logp(hidden.requires_grad_(), weight, ids, saved_mib=4)
    with torch.no_grad():
        assert linear_logp(hidden, weight, ids, saved_mib=4).grad_fn is None
    saved = out.grad_fn.next_functions[0][0].saved_tensors
    kept = [value for value in saved if value is not None and value.shape == (9, 256)]
    assert [value.dtype for value in kept] == [torch.float32]
