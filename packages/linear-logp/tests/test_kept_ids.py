"""``kept_ids`` gives the log-probs of a softmax over the set of ids: against FP64, and in bits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.rowwise.sums import sum_over_rows
from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.linear_logp import Memory, arguments, linear_logp, linear_logp_from_known, linear_logp_known
from rl_kernels.linear_logp.inputs import Inputs
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.reference import linear_logp as defined

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULES = tuple(f"rl_kernels.linear_logp.{name}" for name in ("inputs", "kept_columns", "backward", "backends.native"))
BUGS = (
    Bug("a target that is not kept counts", ".masked_fill_(place < 0, -torch.inf)", ""),
    Bug("gradient of a target that is not kept", "inputs.grad_logp.masked_fill(place < 0, 0.0)", "inputs.grad_logp"),
    Bug("-1 is the last column", "torch.where(ids == FILLING, vocab, ids)", "ids % vocab"),
    Bug("an id that occurs twice counts twice", "ids.masked_fill(is_repeated, vocab).sort", "ids.sort"),
    Bug("dz is not scattered", ".scatter_(1, index, value)", ""),
    Bug("dz of others in a piece's first column", "torch.where(is_here, each, each.gather(1, one))", "each"),
    Bug("order as given", "ids = ids.sort(-1).values", "pass"),
    Bug(
        "terms of the bias without the first columns",
        "_write(block, first + part.start, terms)",
        "_write(block, first, terms)",
    ),
    Bug("columns of the first rows", "*over_columns)", "*self[16:])"),
    Bug("dz of an ignored row", "if ignore_index is not None:\n        ids = ids", "if False:\n        ids = ids"),
)
MODULE = "rl_kernels.linear_logp.kept_columns"
NAMES = ("hidden", "lm_head_weight", "bias")
OF_ROWS = ("hidden", "target_ids", "kept_ids", "temperature")


def run(call: dict[str, Any], upstream: list[torch.Tensor], function: Any = linear_logp) -> list[torch.Tensor]:
    """Return statistics and gradients of hidden states, weight and bias."""
    leaves = {name: call[name].clone().requires_grad_() for name in NAMES}
    result = function(**{**call, **leaves}, return_stats=True)
    torch.autograd.backward(list(result), upstream)
    return [*(value.detach() for value in result), *(leaf.grad for leaf in leaves.values())]


def same(result: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(bits_of(one), bits_of(other))


def drawn(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a call with logits that are often equal, and upstream gradients; some targets are not kept."""
    (rows, size, vocab, most), draw = shape, Draw(dtype, device, seed=shape[0])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids, kept = draw.ids(vocab, rows), draw.ids(vocab, rows, most).masked_fill(draw.mask(0.3, rows, most), -1)
    kept[:, 0], ids[-1] = torch.where(draw.mask(0.6, rows), ids, draw.ids(vocab, rows)), IGNORED
    kept[:, most // 2] = kept[:, 0]
    call = {
        "hidden": draw.normal(rows, size).round(),
        "lm_head_weight": draw.normal(vocab, size).round(),
        "bias": draw.normal(vocab),
        "target_ids": ids,
        "kept_ids": kept,
        "temperature": draw.uniform(0.3, 2.0, rows, dtype=wide),
        "softcap": 8.0,
        "ignore_index": IGNORED,
    }
    upstream = [draw.normal(rows, dtype=wide) for _ in range(3)]
    return call, upstream


def check(backend: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    call, upstream = drawn(shape, dtype, device)
    ids, kept, rows = call["target_ids"], call["kept_ids"], len(call["target_ids"])
    ours = {**call, "validate": False, "backend": backend}
    result = run(ours, upstream)
    # The log-prob of a target that is not kept is -inf, and has no gradient.
    is_in = (kept == ids[:, None]).any(1) | (ids == IGNORED)
    assert torch.equal(result[0] == -torch.inf, ~is_in)
    gold = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in call.items()
    }
    expected = run(gold, [torch.where(is_in, upstream[0], 0.0), *upstream[1:]], defined)
    for one, other in zip(result, expected, strict=True):
        bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2) * max(
            float(other[other.isfinite()].abs().max()), 1
        )
        finite = other.isfinite()
        assert torch.equal(finite, one.isfinite())
        assert float((one.double() - other)[finite].abs().max()) <= bound
    dropped = torch.ones(len(call["bias"]) + 1, dtype=torch.bool, device=device)
    dropped[kept[ids != IGNORED].flatten()] = False
    assert not any(bool(value[dropped[:-1]].any()) for value in result[4:])
    # The set counts, not its order, how often it has an id, or how far it is padded.
    order = torch.rand(kept.shape, device=device).argsort(1)
    padded = torch.cat((kept.gather(1, order), kept.new_full((rows, 71), -1), kept[:, :1]), 1)
    same(run({**ours, "kept_ids": padded.int()}, upstream), result)
    for memory in (Memory(workspace_mib=1), Memory(saved_mib=0), "fast"):
        same(run({**ours, "memory": memory}, upstream), result)
    # A row alone; rows with another one appended, which is ignored; all but the last bits of sums over tokens.
    places = range(rows) if rows < 9 else (0, rows // 2, rows - 1)
    for at in (slice(row, row + 1) for row in places):
        alone = {name: call[name][at] for name in OF_ROWS}
        part = run({**ours, **alone}, [value[at] for value in upstream])
        same(part[:4], [value[at] for value in result[:4]])
    longer = {
        name: torch.cat((call[name], call[name][:1])) for name in ("hidden", "target_ids", "kept_ids", "temperature")
    }
    longer["hidden"][-1], longer["target_ids"][-1] = torch.nan, IGNORED
    more = run({**ours, **longer}, [torch.cat((value, value[:1])) for value in upstream])
    same([*(value[:rows] for value in more[:4]), *more[4:]], result)


def check_step() -> None:
    """Compare the step of backward with a dense dz, in a piece of several units that is not the first."""
    draw, rows, width = Draw(torch.float32, "cpu", seed=5), 40, 2100
    columns = draw.ids(3000, rows, 300).sort(-1).values
    columns = torch.where(columns == columns.roll(1, 1), 3000, columns)
    values, total = draw.normal(rows, 300), draw.normal(width)
    block = Inputs._make([*[None] * 8, torch.zeros(rows, 2), *[None] * 5, 0, 3000, columns, values])
    dense = torch.zeros(rows, 3001).scatter_(1, columns, values)[:, 700 : 700 + width]
    for dbias in (None, total.clone()):
        dz = torch.full((rows, width), torch.nan)
        sys.modules[MODULE].scattered(block, slice(700, 700 + width), dbias, dz)(block, dbias, dz)
        assert torch.equal(dz, dense)
        assert dbias is None or torch.equal(dbias, sum_over_rows(dense, total))


def backends(dtype: torch.dtype) -> list[str]:
    described = Call.of(torch.zeros(1, dtype=dtype), D=8)
    return [backend.name for backend in OPERATOR.backends if backend.why_not(described) is None]


CASES = (
    ((3, 8, 70, 6), torch.float64),
    ((5, 24, 1300, 9), torch.float32),
    ((8, 8, 2500, 700), torch.float32),
    ((200, 16, 2100, 20), torch.float16),
    ((70, 16, 1030, 1), torch.bfloat16),
)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_kept_ids_are_a_set(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for backend in backends(dtype):
        # Triton's interpreter truncates BF16.
        if backend == "native" or dtype != torch.bfloat16:
            check(backend, shape, dtype)


def test_dz_is_scattered_into_a_piece() -> None:
    check_step()


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), [*CASES[3:], ((1100, 64, 9001, 50), torch.bfloat16)], ids=str)
def test_kept_ids_on_a_gpu(gpu_backend: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(gpu_backend, shape, dtype, DEVICE)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_in_kept_ids_shows(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    def checks() -> None:
        check("native", (200, 16, 1300, 70), torch.float32)
        check_step()

    with planted(MODULES, bug):
        # The operator is not planted, and calls this module.
        monkeypatch.setattr(arguments, "kept_columns", sys.modules[MODULE])
        with pytest.raises((AssertionError, RuntimeError)):
            checks()


@pytest.mark.parametrize("memory", ["lean", "fast"])
def test_the_last_pass_frees_the_logits_of_the_ids(memory: str) -> None:
    call, upstream = drawn((200, 16, 2100, 20), torch.float32, DEVICE)
    leaves = [call[name].requires_grad_() for name in NAMES]
    logp = linear_logp(**call, validate=False, memory=memory)
    kept, passes = logp.grad_fn.saved_tensors[-1], []
    copy = kept.clone()
    assert kept.shape == call["kept_ids"].shape
    for is_last in (False, True):
        passes.append(torch.autograd.grad(logp, leaves, upstream[0], retain_graph=not is_last))
        assert torch.equal(kept, kept.new_empty(0, 0) if is_last else copy)
    same(*map(list, passes))


def test_rows_without_kept_ids_and_bad_ids_are_nan() -> None:
    call, upstream = drawn((6, 8, 70, 4), torch.float32, DEVICE)
    kept = call["target_ids"].clamp(min=0)[:, None].repeat(1, 4)
    kept[1], kept[2, 3], kept[3, 0], call["target_ids"][4] = -1, 70, -2, 70
    result = run({**call, "kept_ids": kept, "validate": False}, upstream)
    is_nan = torch.tensor([False, True, True, True, True, False], device=DEVICE)
    assert torch.equal(result[0].isnan(), is_nan)
    assert torch.equal(result[3].isnan(), is_nan[:, None].expand(6, 8))
    for value in result[1:3]:
        assert torch.equal(value.isnan(), is_nan & (call["target_ids"] != 70))


def test_kept_ids_are_refused_where_nothing_uses_them() -> None:
    call, _ = drawn((6, 8, 70, 4), torch.float32, DEVICE)
    call["kept_ids"][:, 0] = call["target_ids"].clamp(min=0)
    known = linear_logp_known(**{name: value for name, value in call.items() if name != "kept_ids"})
    for function in (linear_logp_known, lambda **more: linear_logp_from_known(**more, known=known)):
        with pytest.raises(ValueError, match=r"^kept_ids: expected None with known statistics"):
            function(**call)
    with pytest.raises(ValueError, match=r"^target_ids: expected tokens that are in kept_ids, 1 of 6 are not"):
        linear_logp(**{**call, "kept_ids": call["kept_ids"].index_fill(0, torch.tensor([2], device=DEVICE), -1)})
