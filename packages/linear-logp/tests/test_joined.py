"""Sums of chains of ``join_tokens`` tokens: what they are, and what changes no bit of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import Memory, linear_logp
from rl_kernels.linear_logp.backends import native
from rl_kernels.linear_logp.op import OPERATOR, ops

MODULES = tuple(f"rl_kernels.linear_logp.{name}" for name in ("backward", "backends.native"))
BUG = Bug(
    "chains added in another order",
    "range(0, count, chain)",
    "[*range(0, count, chain)][::-1]",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, SIZE, VOCAB, JOIN = 200, 24, 1100, 48
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_index": IGNORED, "temperature": "tensor"},
    {"softcap": 9.0, "logit_scale": 0.5, "main_grad": True},
    {"vocab_segments": 8, "memory": Memory(saved_mib=4), "main_grad": True},
)
FORMS: tuple[dict[str, Any], ...] = (
    {"memory": Memory(workspace_mib=1)},
    {"memory": Memory(workspace_mib=4096)},
    {"memory": Memory(saved_mib=0)},
    {"memory": Memory(saved_mib=1)},
    {"memory": Memory(saved_mib=4096)},
    {"vocab_segments": 8},
)
"""What must change no bit of the gradients of weight and bias."""


class Batch:
    """Operands of a call, and the upstream gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = ROWS, **options: Any) -> None:
        self.dtype, self.options = dtype, dict(options)
        device = "cpu" if options.get("backend", "native") == "native" else DEVICE
        draw = Draw(dtype, device, seed=5)
        self.hidden, self.weight = draw.normal(rows, SIZE), draw.normal(VOCAB, SIZE, scale=SIZE**-0.5)
        self.bias, self.ids = draw.normal(VOCAB), draw.ids(VOCAB, rows)
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.upstream = draw.normal(rows, dtype=self.wide)
        self.start = draw.normal(VOCAB, SIZE, dtype=torch.float32) if self.options.pop("main_grad", False) else None
        scale = draw.uniform(0.5, 2.0, rows, dtype=torch.float32)
        if self.options.get("temperature") == "tensor":
            self.options["temperature"] = scale
        if "ignore_index" in options:
            self.ids[: JOIN + 3] = self.ids[::5] = IGNORED

    def gradients(self, *ends: int, **more: Any) -> dict[str, torch.Tensor]:
        """Return the gradients of calls with the rows between ends: of the weight the last one, or ``main_grad``."""
        weight, leaves = self.weight.clone().requires_grad_(), {}
        if self.start is not None:
            weight.main_grad = self.start.clone()
        for first, last in pairwise(ends or (0, len(self.ids))):
            rows, options = slice(first, last), {"join_tokens": JOIN, **self.options, **more}
            if isinstance(options.get("temperature"), torch.Tensor):
                options["temperature"] = options["temperature"][rows]
            leaves = {"hidden": self.hidden[rows].clone().requires_grad_(), "bias": self.bias.clone().requires_grad_()}
            result = linear_logp(leaves["hidden"], weight, self.ids[rows], bias=leaves["bias"], **options)
            result.backward(self.upstream[rows])
        total = weight.grad if self.start is None else weight.main_grad
        return {"weight": total, **{name: leaf.grad for name, leaf in leaves.items()}}

    def defined(self, **more: Any) -> dict[str, torch.Tensor]:
        """Return the gradients of weight and bias as they are defined: chains from 0, added in order."""
        backend, scale = more["backend"], self.options.get("temperature", 1.0)
        scale = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale)
        cap = self.options.get("softcap")
        cap = None if cap is None else torch.tensor([cap, self.options["logit_scale"] / cap], dtype=torch.float64)
        ignored, scale = self.options.get("ignore_index"), scale.to(self.wide)
        whole = self.hidden, self.weight, self.ids, self.bias, scale, ignored, cap, None
        norm = ops["forward"](*whole, 0, backend)[1]
        width = self.wide if self.start is None else torch.float32
        totals = [torch.zeros_like(value, dtype=width) for value in (self.weight, self.bias)]
        totals[1] = totals[1].to(self.wide)
        if self.start is not None:
            totals[0] += self.start
        for first in range(0, len(self.ids), JOIN):
            rows = slice(first, first + JOIN)
            inputs = self.hidden[rows], self.weight, self.ids[rows], self.bias, scale[rows] if scale.ndim else scale
            saved = norm[rows], None, None, self.upstream[rows], None, None, 0, VOCAB, 1, False, None
            chain = [torch.zeros_like(total) for total in totals]
            rest = None, [False, True, True], None, False, *chain, backend
            ops["backward_main_grad"](*inputs, ignored, cap, None, *saved, *rest)
            for total, value in zip(totals, chain, strict=True):
                total += value
        weight = totals[0] if self.start is not None else totals[0].to(self.dtype)
        return {"weight": weight, "bias": totals[1].to(self.dtype)}


def same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *names: str) -> None:
    for name in names or expected:
        assert result[name].dtype == expected[name].dtype, name
        assert torch.equal(bits_of(result[name]), bits_of(expected[name])), name


def backends() -> Iterator[Any]:
    for backend in OPERATOR.backends:
        device = "cpu" if backend.name == "native" else DEVICE
        reason = backend.why_not(Call.of(torch.zeros(1, 8, device=device, dtype=torch.bfloat16), D=8))
        marks = [pytest.mark.skipif(reason is not None, reason=str(reason))]
        if device == "cuda":
            marks.append(pytest.mark.gpu)
        yield pytest.param(backend.name, marks=marks)


def dtypes(backend: str) -> list[torch.dtype]:
    wide = {"native": [torch.float32, torch.float64], "triton": [torch.float32]}
    return [torch.bfloat16, *wide.get(backend, [])]


def few(backend: str) -> bool:
    """Say whether the kernels are interpreted, which is slow."""
    return backend == "triton" and DEVICE == "cpu"


@pytest.mark.parametrize("backend", backends())
def test_chains_are_added_in_order(backend: str) -> None:
    for options in OPTIONS[1:2] if few(backend) else OPTIONS:
        for dtype in dtypes(backend):
            batch = Batch(dtype, backend=backend, **options)
            result, expected = batch.gradients(), batch.defined(backend=backend)
            same(result, expected)
            one = batch.gradients(join_tokens=None)
            assert not torch.equal(result["weight"], one["weight"])
            same(result, one, "hidden")
            for form in FORMS if backend == "native" else ():
                same(batch.gradients(**form), expected)


@pytest.mark.parametrize("backend", backends())
def test_micro_batches_change_no_bit(backend: str) -> None:
    for options in OPTIONS[2:3] if few(backend) else OPTIONS:
        batch = Batch(torch.bfloat16, backend=backend, **{**options, "main_grad": True})
        whole = batch.gradients()
        for ends in ((0, 96, 144, 200), *[(0, 48, 200)] * (not few(backend))):
            same(batch.gradients(*ends), whole, "weight")
        # Inside a chain a cut is another sum.
        assert not torch.equal(batch.gradients(0, 64, 200)["weight"], whole["weight"])


@pytest.mark.parametrize(("join", "dtype"), [(16, torch.bfloat16), (144, torch.float32), (208, torch.bfloat16)])
@pytest.mark.parametrize("main_grad", [False, True])
def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, join: int, main_grad: bool) -> None:
    batch = Batch(dtype, join_tokens=join, main_grad=main_grad)
    expected = batch.gradients()
    monkeypatch.setattr(native, "BLOCK_ELEMENTS", 1)
    with patch.object(native.Steps, "dweight", autospec=True, side_effect=native.Steps.dweight) as watched:
        for form in FORMS:
            same(batch.gradients(**form), expected, "weight", "bias")
    heights = {len(call.args[1]) for call in watched.call_args_list}
    # A workspace of 1 MiB has blocks of 64 rows, and no block is longer than a chain.
    assert heights == {16, 8} if join == 16 else 64 in heights
    assert max(heights) == min(join, ROWS)


@pytest.mark.parametrize("backend", backends())
def test_leading_ignored_rows_belong_to_chains(backend: str) -> None:
    options = {"backend": backend, "ignore_index": IGNORED, "main_grad": True}
    batch = Batch(torch.bfloat16, **options)
    expected = batch.gradients()
    # Ignored rows in front, a whole chain of them, move none to another chain.
    moved = Batch(torch.bfloat16, **options)
    moved.hidden, moved.ids, moved.upstream = (x[JOIN:] for x in (batch.hidden, batch.ids, batch.upstream))
    same(moved.gradients(), expected, "weight", "bias")
    moved.hidden, moved.ids, moved.upstream = (x[JOIN + 3 :] for x in (batch.hidden, batch.ids, batch.upstream))
    assert not torch.equal(moved.gradients()["weight"], expected["weight"])


def test_planted_bug_fails() -> None:
    batch = Batch(torch.float32, **OPTIONS[2])
    expected = batch.defined(backend="native")
    with planted(MODULES, BUG), pytest.raises(AssertionError):
        same(batch.gradients(backend="native"), expected)


@pytest.mark.gpu
def test_joined_chains_reduce_the_error_of_a_long_sum() -> None:
    """131,072 tokens of one sign: one chain of the weight's gradient shrinks on Hopper, chains of 4096 do not."""
    draw = Draw(torch.bfloat16, "cuda", seed=9)
    hidden = draw.uniform(0.0, 1.0, 1 << 17, 64)
    weight = torch.zeros(256, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    ids, ones = torch.zeros(len(hidden), dtype=torch.int64, device="cuda"), torch.ones(len(hidden), device="cuda")
    # Of equal logits: dz is 255/256 for the first entry, rounded to BF16.
    dz = torch.tensor(255 / 256, dtype=torch.bfloat16).double()
    exact = dz * hidden.double().sum(0)
    for join, most in ((None, 2e-3), (4096, 4e-5)):
        weight.main_grad = torch.zeros(256, 64, device="cuda")
        linear_logp(hidden, weight, ids, join_tokens=join).backward(ones)
        assert float(((weight.main_grad[0].double() - exact) / exact).abs().max()) < most
