"""Bits of linear_logp that no layout of rows shows: main_grad, workspace, threads, blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import IGNORED, Draw
from rl_kernels.linear_logp import linear_logp
from rl_kernels.linear_logp.backends import native

ROWS, SIZE, VOCAB = 100, 20, 2100


def _call(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    draw = Draw(dtype, seed=11)
    weight = draw.normal(VOCAB, SIZE, scale=SIZE**-0.5).requires_grad_()
    call = {"hidden": draw.normal(ROWS, SIZE).requires_grad_(), "lm_head_weight": weight, "bias": draw.normal(VOCAB)}
    return {**call, "target_ids": draw.ids(VOCAB, ROWS), "temperature": 0.8}


def _upstream() -> torch.Tensor:
    return Draw(torch.float32, seed=12).normal(ROWS)


def _backward(call: dict[str, Any], rows: slice = slice(None), **options: Any) -> None:
    """Run forward and backward on some of the rows."""
    part = {**call, "hidden": call["hidden"][rows], "target_ids": call["target_ids"][rows], **options}
    linear_logp(**part).backward(_upstream()[rows])


def _main_grad(call: dict[str, Any]) -> torch.Tensor:
    call["lm_head_weight"].main_grad = torch.zeros(VOCAB, SIZE)
    return call["lm_head_weight"].main_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_the_unrounded_gradient(dtype: torch.dtype) -> None:
    plain, continued = _call(dtype), _call(dtype)
    _backward(plain)
    total = _main_grad(continued)
    _backward(continued)
    assert continued["lm_head_weight"].grad is None
    assert torch.equal(total.to(dtype), plain["lm_head_weight"].grad)
    assert torch.equal(continued["hidden"].grad, plain["hidden"].grad)


@pytest.mark.parametrize("cuts", [(0, 16, ROWS), (0, 48, 64, ROWS), (0, *range(16, ROWS, 16), ROWS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_cut_at_multiples_of_16_gives_the_bits_of_the_whole(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    whole, parts = _call(dtype), _call(dtype)
    expected, found = _main_grad(whole), _main_grad(parts)
    _backward(whole)
    for start, stop in pairwise(cuts):
        _backward(parts, slice(start, stop))
    assert torch.equal(found, expected)
    assert torch.equal(parts["hidden"].grad, whole["hidden"].grad)


def test_only_gradients_that_are_asked_for_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``needs_input_grad`` says which may be; the pass under way may want fewer, and main_grad is not to be touched."""
    formed: list[Any] = []
    monkeypatch.setattr(native, "backward", _noting(formed, native.backward))
    call = {**_call(), "backend": "native"}
    leaves = [call["hidden"], call["lm_head_weight"], call["bias"].requires_grad_()]
    for wanted in product((False, True), repeat=3):
        if any(wanted):
            asked = [leaf for leaf, is_asked in zip(leaves, wanted, strict=True) if is_asked]
            torch.autograd.grad(linear_logp(**call).sum(), asked)
            linear_logp(**call).sum().backward(inputs=asked)
            assert formed[-2:] == [list(wanted)] * 2
    total = _main_grad(call)
    torch.autograd.grad(linear_logp(**call).sum(), leaves[::2])
    assert not total.any()
    torch.autograd.grad(linear_logp(**call).sum(), leaves[1], allow_unused=True)
    assert bool(total.any())


def _noting(formed: list[Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    def note(*arguments: Any) -> Any:
        formed.append(list(arguments[18]))
        return backward(*arguments)

    return note


def test_main_grad_of_any_strides_is_continued_in_place() -> None:
    plain, spread = _call(), _call()
    start = Draw(torch.float32, seed=13).normal(VOCAB, SIZE)
    _main_grad(plain).copy_(start)
    storage = torch.zeros(SIZE, 2 * VOCAB)
    spread["lm_head_weight"].main_grad = storage[:, ::2].t().copy_(start)
    for call in (plain, spread):
        _backward(call)
    assert torch.equal(storage[:, ::2].t(), plain["lm_head_weight"].main_grad)
    assert not torch.equal(storage[:, ::2].t(), start)
    assert not storage[:, 1::2].any()


def test_main_grad_changed_between_forward_and_backward_is_continued_all_the_same() -> None:
    call = _call()
    total = _main_grad(call)
    parts = [linear_logp(**call) for _ in range(2)]
    for part in parts:
        part.backward(_upstream())
    single = _call()
    once = _main_grad(single)
    _backward(single)
    assert not torch.equal(total, once)
    torch.testing.assert_close(total, 2 * once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_main_grad_of_a_frozen_weight_is_neither_checked_nor_written(dtype: torch.dtype) -> None:
    call = _call()
    call["lm_head_weight"].requires_grad_(False)
    call["lm_head_weight"].main_grad = torch.zeros(VOCAB, SIZE, dtype=dtype)
    _backward(call)
    assert not call["lm_head_weight"].main_grad.any()


def test_main_grad_under_autocast_belongs_to_the_uncast_weight() -> None:
    call, cast = _call(), _call(torch.bfloat16)
    found, expected = _main_grad(call), _main_grad(cast)
    with torch.autocast("cpu", torch.bfloat16):
        result = linear_logp(**call)
    result.backward(_upstream())
    _backward(cast)
    assert torch.equal(found, expected)


def test_double_backward_with_main_grad_raises() -> None:
    call = _call()
    _main_grad(call)
    (grad,) = torch.autograd.grad(linear_logp(**call).square().sum(), call["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_ignored_rows_appended_change_no_bit_of_the_weights_gradient() -> None:
    call = _call()
    call["bias"].requires_grad_()
    longer = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()
    }
    longer["hidden"] = torch.cat((longer["hidden"], torch.full((29, SIZE), torch.nan))).requires_grad_()
    longer["target_ids"] = torch.cat((longer["target_ids"], torch.full((29,), IGNORED)))
    for name in ("lm_head_weight", "bias"):
        longer[name].requires_grad_()
    _backward(call)
    linear_logp(**longer, ignore_index=IGNORED).backward(torch.cat((_upstream(), torch.full((29,), torch.nan))))
    for name in ("lm_head_weight", "bias"):
        assert torch.equal(longer[name].grad, call[name].grad), name
    assert torch.equal(longer["hidden"].grad[:ROWS], call["hidden"].grad)
    assert not longer["hidden"].grad[ROWS:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_changes_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    heights = []
    add = native.Steps.add_dhidden

    def watched(self: native.Steps, dz: torch.Tensor, *others: torch.Tensor, continues: bool) -> None:
        heights.append(len(dz))
        add(self, dz, *others, continues=continues)

    monkeypatch.setattr(native.Steps, "add_dhidden", watched)
    found = []
    for workspace_mib in (1, 4096):
        call = _call(dtype)
        call["bias"].requires_grad_()
        _backward(call, workspace_mib=workspace_mib)
        found.append([call[name].grad for name in ("hidden", "lm_head_weight", "bias")])
    assert {64, ROWS} <= {*heights}
    assert all(torch.equal(small, large) for small, large in zip(*found, strict=True))


def test_height_of_forward_blocks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call()
    expected = linear_logp(**call, return_stats=True)
    monkeypatch.setattr(native, "BLOCK_ELEMENTS", 1)
    found = linear_logp(**call, return_stats=True)
    assert all(torch.equal(value, truth) for value, truth in zip(found, expected, strict=True))


def test_threads_change_no_bit(torch_threads: Callable[[int], AbstractContextManager[None]]) -> None:
    found = []
    for count in (1, 2):
        call = _call()
        call["bias"].requires_grad_()
        with torch_threads(count):
            _backward(call)
            found.append([linear_logp(**call).detach(), *(call[n].grad for n in ("hidden", "lm_head_weight", "bias"))])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
