"""Calls of the functions of grpo_loss that must raise at any size, and part of their messages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.testing import IllegalCall, edited, given
from rl_kernels.core.testing.spec import Change, Inputs
from rl_kernels.grpo_loss.spec import illegal_objectives
from rl_kernels.lab.check.illegal import Row, illegal_backends, illegal_numbers


def _tensor(name: str, *, optional: bool = False, dtype: torch.dtype = torch.int64) -> list[Row]:
    """Return illegal values of a tensor whose shape follows from current_logps; ``dtype`` is a wrong dtype."""
    wrong = f"{name}: expected "
    rows: list[Row] = [
        (f"{name} a list", given(**{name: [1.0]}), TypeError, wrong + "a tensor"),
        (f"{name} of {dtype}", edited(name, lambda x: x.to(dtype)), TypeError, wrong + "dtype"),
        (f"{name} sparse", edited(name, lambda x: x.to_sparse()), TypeError, wrong + "a strided tensor"),
        (f"{name} of another batch", edited(name, lambda x: x[1:]), ValueError, wrong + "shape"),
        (f"{name} elsewhere", edited(name, lambda x: x.to("meta")), ValueError, wrong + "device"),
    ]
    if not optional:
        rows.append((f"{name} missing", given(**{name: None}), TypeError, wrong + "a tensor"))
    return rows


def _tokens(name: str, *, optional: bool = False, dtype: torch.dtype = torch.int64) -> list[Row]:
    wrong = f"{name}: expected shape"
    return [
        *_tensor(name, optional=optional, dtype=dtype),
        (f"{name} of another length", edited(name, lambda x: x[:, 1:]), ValueError, wrong),
        (f"{name} of three dims", edited(name, lambda x: x[None]), ValueError, wrong),
    ]


def _number(name: str, bound: str, *outside: float, optional: bool = False) -> list[Row]:
    beyond = f"{name} beyond FP32", given(**{name: 1e39}), ValueError, f"{name}: expected a number within"
    return [*illegal_numbers(name, bound, *outside, optional=optional), beyond]


def _grouped(samples_per_prompt: object = None, group_boundaries: object = None) -> Change:
    def change(inputs: Inputs) -> Inputs:
        return {**inputs, "samples_per_prompt": samples_per_prompt, "group_boundaries": group_boundaries}

    return change


def _offsets(make: Callable[[int], list[int]], *, tensor: bool) -> Change:
    """Return a change to boundaries made from the number of rewards, so that they are wrong at every size."""

    def change(inputs: Inputs) -> Inputs:
        offsets = make(len(inputs["rewards"]))
        return _grouped(None, torch.tensor(offsets) if tensor else offsets)(inputs)

    return change


SAMPLES = "samples_per_prompt: expected "
BOUNDARIES = "group_boundaries: expected "
ONE_OF = "samples_per_prompt, group_boundaries: expected exactly one of them, got "
WRONG_OFFSETS: dict[str, Callable[[int], list[int]]] = {
    "not from 0": lambda count: [1, count],
    "from 1 on": lambda count: [1, 3, 6],
    "negative": lambda count: [-1, 1, 4],
    "short of B": lambda count: [0, count - 1],
    "beyond B": lambda count: [0, count + 1],
    "decreasing": lambda count: [0, 2 * count, count],
    "with an empty group": lambda count: [0, 0, count],
}


def _groups() -> list[Row]:
    """Return the illegal groupings."""
    rows: list[Row] = [
        ("neither", _grouped(), ValueError, ONE_OF + "neither"),
        ("both", _grouped(2, [0, 8]), ValueError, ONE_OF + "both"),
        ("samples of 1", _grouped(1), ValueError, SAMPLES + "an integer >= 2"),
        ("samples negative", _grouped(-2), ValueError, SAMPLES + "an integer >= 2"),
        ("samples of 70 bits", _grouped(2**70), ValueError, SAMPLES + "an integer <="),
        ("samples no divisor", _grouped(10**6 + 3), ValueError, SAMPLES + "a divisor of the"),
        ("samples a fraction", _grouped(2.0), TypeError, SAMPLES + "an integer"),
        ("samples a bool", _grouped(True), TypeError, SAMPLES + "an integer"),
        ("boundaries empty", _grouped(None, []), ValueError, BOUNDARIES + "offsets"),
        ("boundaries a number", _grouped(None, 8), TypeError, BOUNDARIES + "a sequence"),
        ("boundaries text", _grouped(None, "08"), TypeError, BOUNDARIES + "a sequence"),
        ("boundaries of floats", _grouped(None, [0.0, 8.0]), TypeError, BOUNDARIES + "an integer"),
        ("boundaries, float tensor", _grouped(None, torch.tensor([0.0, 8.0])), TypeError, BOUNDARIES + "dtype"),
        ("boundaries of two dims", _grouped(None, torch.tensor([[0, 8]])), ValueError, BOUNDARIES + "1 dims"),
        ("boundaries too few", _grouped(None, torch.tensor([0])), ValueError, BOUNDARIES + "at least 2 offsets"),
        ("boundaries elsewhere", _grouped(None, torch.tensor([0], device="meta")), ValueError, BOUNDARIES + "device"),
    ]
    for label, make in WRONG_OFFSETS.items():
        for kind in ("list", "tensor"):
            change = _offsets(make, tensor=kind == "tensor")
            rows.append((f"boundaries {label}, {kind}", change, ValueError, BOUNDARIES + "offsets that start at 0"))
    return rows


def _mask_of(value: float, dtype: torch.dtype) -> Row:
    change = edited("completion_mask", lambda mask: torch.full_like(mask, value, dtype=dtype))
    return f"mask of {value}", change, ValueError, "completion_mask: expected values 0 and 1, got"


CURRENT = "current_logps: expected "
LOSS: list[Row] = [
    ("current_logps a list", given(current_logps=[1.0]), TypeError, CURRENT + "a tensor"),
    ("current_logps missing", given(current_logps=None), TypeError, CURRENT + "a tensor"),
    ("current_logps of integers", edited("current_logps", torch.Tensor.int), TypeError, CURRENT + "dtype"),
    ("current_logps of one dim", edited("current_logps", lambda x: x[0]), ValueError, CURRENT + "2 dims"),
    ("current_logps of three dims", edited("current_logps", lambda x: x[None]), ValueError, CURRENT + "2 dims"),
    *_tokens("old_logps", optional=True),
    *_tokens("ref_logps", optional=True),
    *_tokens("completion_mask", dtype=torch.complex64),
    _mask_of(2, torch.int64),
    _mask_of(0.5, torch.float32),
    _mask_of(torch.nan, torch.float32),
    ("no reference", lambda call: {**call, "ref_logps": None, "beta": 0.1}, ValueError, "ref_logps: expected a tensor"),
    *_number("clip_eps", ">= 0", -0.1, optional=True),
    *_number("beta", ">= 0", -0.1, optional=True),
    *illegal_objectives.LOSS,
    *illegal_backends("grpo_loss"),
]
REWARDS: list[Row] = [
    ("rewards of two dims", edited("rewards", lambda x: x[None]), ValueError, "rewards: expected 1 dims"),
    *_number("eps", "> 0", 0.0, -1e-6, 1e-50),
    *illegal_objectives.ESTIMATORS,
    *_groups(),
]
SHAPED = "advantages: expected "
TABLES: dict[str, list[Row]] = {
    "plain": [*LOSS, *_tensor("rewards"), *REWARDS],
    "advantages": [
        *LOSS,
        *_tensor("advantages"),
        ("advantages of three dims", edited("advantages", lambda x: x[None, None]), ValueError, SHAPED + "shape"),
        ("advantages of no dims", given(advantages=torch.tensor(1.0)), ValueError, SHAPED + "at least 1 dims"),
    ],
    "advantages-per-token": _tokens("advantages"),
    "groups": [
        *REWARDS,
        ("rewards a list", given(rewards=[1.0] * 8), TypeError, "rewards: expected a tensor"),
        ("rewards of integers", edited("rewards", torch.Tensor.int), TypeError, "rewards: expected dtype"),
        *illegal_backends("grpo_loss"),
    ],
}
ILLEGAL = tuple(
    IllegalCall(f"{case}: {label}", change, error, match, case)
    for case, rows in TABLES.items()
    for label, change, error, match in rows
)
