"""Hygiene on a toy operator: the honest implementation holds, each misuse of memory fails the check that names it."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.testing import Case, Spec, Variant
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import check_relation

ROWS, COLUMNS = 4, 6


def definition(x, mask, factors, *, reuse=False):
    """Each row's sum of e^x where the mask holds, times the factors."""
    return torch.where(mask, torch.where(mask, x, 0).exp(), 0).sum(-1) * torch.tensor(factors, dtype=x.dtype).prod()


def _inputs(case, draw):
    rows, columns = case.sizes["rows"], case.sizes["columns"]
    inputs = {"x": draw.normal(rows, 2 * columns), "mask": draw.mask(0.6, rows, columns), "factors": [1.5, 2.0]}
    inputs["x"] = inputs["x"][:, ::2] if case.name == "strided" else inputs["x"][:, :columns].contiguous()
    if case.name == "into":
        inputs["out"] = torch.empty(rows)
    if case.name == "reuse":
        inputs["reuse"] = True
    return inputs


def _nan_where_masked(case, inputs, draw):
    yield Variant("NaN under the mask", {**inputs, "x": inputs["x"].masked_fill(~inputs["mask"], torch.nan)})


def _case(name, rows=ROWS, columns=COLUMNS):
    return Case(name, {"rows": rows, "columns": columns})


SPEC = Spec(
    cases=tuple(map(_case, ("plain", "strided", "into", "reuse"))),
    inputs=_inputs,
    references={"": definition},
    classes={"output": "reduction", "gradient:x": "reduction"},
    differentiable=("x",),
    magnitudes=lambda case, inputs, upstream: {},
    transforms={},
    illegal=(),
    hygiene={"masked": _nan_where_masked},
    empty=(_case("no rows", rows=0), _case("no columns", columns=0)),
    writes={"out": "output"},
    inplace={"reuse": "x"},
    unread=frozenset({"out"}),
)


def honest(x, mask, factors, *, reuse=False, out=None):
    total = x[:, :0].sum(1)
    for column, shown in zip(x.unbind(1), mask.unbind(1), strict=True):
        total = total + torch.where(shown, torch.where(shown, column, 0).exp(), 0)
    for factor in factors:
        total = total * factor
    if reuse and total.requires_grad:
        total.register_hook(overwrites_once(x))
    return total if out is None else out.copy_(total)


def overwrites_once(x):
    """Overwrite an input in the first backward pass, and refuse a second."""
    passes = itertools.count(1)

    def hook(grad):
        if next(passes) > 1:
            raise RuntimeError("the first pass has overwritten x")
        x.data.zero_()

    return hook


def never_refusing(x, mask, factors, *, reuse=False, out=None):
    return honest(x, mask, factors, out=out)


def reading(edit):
    """Read the first argument in another way."""
    return lambda x, mask, factors, **options: honest(edit(x), mask, factors, **options)


def after(act):
    """Do something to the inputs once the result is there."""

    def call(x, mask, factors, **options):
        result = honest(x, mask, factors, **options)
        act(x, mask, factors)
        return result

    return call


def gap_overwritten(x, mask, factors):
    if x.stride(-1) == 2:
        x.data.as_strided((len(x), x.shape[1]), x.stride(), x.storage_offset() + 1).zero_()


def element_before_overwritten(x, mask, factors):
    if x.storage_offset():
        x.data.as_strided((1,), (1,), x.storage_offset() - 1).zero_()


def transposed(x, mask, factors):
    x.data = x.data.t().contiguous().t()


def overwritten_in_backward(x, mask, factors, **options):
    if x.requires_grad:
        x.register_hook(lambda grad: x.data.zero_().add(grad))
    return honest(x, mask, factors, **options)


def last_row_unwritten(x, mask, factors, *, reuse=False, out=None):
    result = torch.empty(len(x)) if out is None else out
    result[:-1] = honest(x, mask, factors, reuse=reuse)[:-1]
    return result


def one_element_before(x):
    return x.as_strided(x.shape, x.stride(), max(x.storage_offset() - 1, 0))


def no_stride_of_zero(x):
    if x.numel() and 0 in x.stride():
        raise RuntimeError("unsupported stride")
    return x


def mask_after_exponential(x, mask, factors, *, reuse=False, out=None):
    result = torch.where(mask, x.exp(), 0).sum(-1) * factors[0] * factors[1]
    return result if out is None else out.copy_(result)


def one_row_at_least(x, mask, factors, **options):
    return honest(x, mask, factors, **options) if len(x) else x.sum()[None]


def ignoring_out(x, mask, factors, *, reuse=False, out=None):
    return honest(x, mask, factors, reuse=reuse)


BUFFER = torch.empty(ROWS)


def same_buffer(x, mask, factors, **options):
    result = honest(x, mask, factors, **options).clone()
    if result.shape == BUFFER.shape and "out" not in options:
        result.data = BUFFER.copy_(result.detach())
    return result


def ignoring_strided_out(x, mask, factors, *, out=None, **options):
    if out is None or out.is_contiguous():
        return honest(x, mask, factors, out=out, **options)
    return honest(x, mask, factors, out=out.contiguous(), **options)


def writing_beside_out(x, mask, factors, *, out=None, **options):
    result = honest(x, mask, factors, out=out, **options)
    if out is not None and out.stride(0) == 2:
        out.as_strided((2 * len(out) - 1,), (1,), out.storage_offset())[1::2] = 0.0
    return result


MOVED = "inputs unchanged, every other element"
BUGS = {
    "input overwritten": (after(lambda x, mask, factors: x.data.zero_()), "inputs unchanged", "x was changed"),
    "input overwritten in backward": (overwritten_in_backward, "inputs unchanged", "x was changed"),
    "mask overwritten": (after(lambda x, mask, _: mask.data.logical_not_()), "inputs unchanged", "mask was changed"),
    "input transposed": (after(transposed), "inputs unchanged", "x was changed: expected strides"),
    "input overwritten where no gradient is asked for": (
        *(after(lambda x, mask, factors: None if x.requires_grad else x.data.zero_()),),
        *("inputs unchanged, without gradient", "x was changed"),
    ),
    "input overwritten under other strides": (
        *(after(lambda x, mask, factors: None if x.is_contiguous() else x.data.zero_()), MOVED, "x was changed"),
    ),
    "written beside an offset input": (
        *(after(element_before_overwritten), "inputs unchanged, one element into the storage", "x was changed"),
    ),
    "gap overwritten": (after(gap_overwritten), "inputs unchanged", "x was changed", "strided"),
    "list edited": (
        *(after(lambda x, mask, factors: factors.append(1.0)), "inputs unchanged"),
        r"factors was changed: got \[1.5, 2.0, 1.0\]",
    ),
    "another argument reused": (
        *(after(lambda x, mask, factors: mask.data.zero_()), "inputs unchanged", "mask was changed", "reuse"),
    ),
    "output not wholly written": (last_row_unwritten, "output, poisoned memory", r"at \[3\].*expected"),
    "reads beside an offset input": (reading(one_element_before), "offset", "output: .* differ in bits"),
    "wrong under other strides": (
        *(reading(lambda x: x.as_strided(x.shape, (x.shape[1], 1))), "strided"),
        "every other element, output: .* differ in bits",
    ),
    "raises under other strides": (
        *(reading(lambda x: x.view(-1).view(x.shape)), "strided", "forward raised RuntimeError: view size"),
    ),
    "fails on a stride of 0": (reading(no_stride_of_zero), "x expanded", "unsupported stride"),
    "masked lane leaks into the gradient": (
        *(mask_after_exponential, "masked", "NaN under the mask, gradient:x: .* differ in bits"),
    ),
    "masked lane leaks into the output": (
        *(reading(lambda x: x + 0 * x.sum()), "masked", "NaN under the mask, output: .* differ in bits"),
    ),
    "wrong shape of nothing": (one_row_at_least, "empty: no rows", "Mismatch in shape"),
    "fails on nothing": (
        *(reading(lambda x: x - 0 * x.amax(1)[:, None]), "empty: no columns", "forward raised IndexError"),
    ),
    "strided out ignored": (ignoring_strided_out, MOVED, "out does not hold its result", "into"),
    "gap of out overwritten": (
        *(writing_beside_out, MOVED, "out does not hold its result, or was changed outside of it", "into"),
    ),
    "out ignored": (ignoring_out, "out holds output", "differ in bits", "into"),
    "a second pass that is not refused": (never_refusing, "backward again", "nothing was raised", "reuse"),
    "wrong in the middle of a larger tensor": (
        *(reading(lambda x: x + (x.storage_offset() > 1)), "strided", "in the middle, output: .* differ in bits"),
    ),
    "same buffer again": (same_buffer, "a call in between", "output: .* differ in bits"),
}


def records(function, name):
    candidate = Candidate("toy", SimpleNamespace(name="toy"), lambda _, kwargs: function(**kwargs))
    return list(
        check_relation(Cell(candidate, SPEC, SPEC.case(name), Setting("fp32", torch.device("cpu"), "cpu")), "hygiene")
    )


MOVES = ("without gradient", "every other element", "in the middle", "stored column by column")
START = [
    *("inputs unchanged", "output, poisoned memory", "gradient:x, poisoned memory"),
    *(f"inputs unchanged, {where}" for where in (*MOVES, "one element into the storage")),
    "a call in between",
]
UPDATED = [
    *("results written into", "inputs updated in place", "inputs updated unseen"),
    *(f"inputs updated unseen, {how}" for how in ("no gradients", "parameters", "permuted")),
    *("inputs updated unseen by little, no gradients", "inputs updated unseen in one place"),
    *("inputs updated unseen in one place, no gradients", "inputs updated in place, autocast"),
    *("x written before backward", "mask written before backward"),
]
AROUND = [
    "default dtype FP64",
    "default device meta",
    "inference mode",
    "matmul precision medium",
    "arguments computed",
]
LAYOUTS = ["strided", "offset", "masked"]
END = ["x expanded", *AROUND, "checkpointed", "autocast", "autocast, backward inside"]
FP16 = ["autocast to FP16", "autocast to FP16, backward inside", "after refused calls"]
EMPTY = ["empty: no rows", "empty: no columns"]
ITEMS = {
    "plain": [*START, "300 calls pending", "backward again", *UPDATED, *END, *FP16, *LAYOUTS, *EMPTY],
    "strided": [*START, "backward again", *UPDATED, *END, *LAYOUTS],
    "into": [
        *("inputs unchanged", "out holds output", "output, poisoned memory", *START[3:]),
        *("x expanded", *AROUND, "autocast", *LAYOUTS),
    ],
    # Values that share memory cannot be overwritten one by one.
    "reuse": [*START, "backward again", *AROUND, "autocast", "autocast, backward inside", *LAYOUTS],
}


@pytest.mark.parametrize("case", ITEMS)
def test_an_honest_implementation_holds(case):
    found = records(honest, case)
    assert [record.item for record in found] == ITEMS[case]
    assert not [(record.item, record.comparison.message) for record in found if not record.passed]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_fails_the_check_that_names_it(bug):
    function, item, message, case = (*BUGS[bug], "plain")[:4]
    failed = {record.item: record.comparison.message for record in records(function, case) if not record.passed}
    assert item in failed
    assert re.search(message, failed[item]), failed[item]
