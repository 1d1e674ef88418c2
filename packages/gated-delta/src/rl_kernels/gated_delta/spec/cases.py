"""The cases of gated_delta_rule: inputs, error budget, promised layouts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.core.testing import Case, Draw, Inputs, Spec
from rl_kernels.lab.check.rows import RowLayout
from rl_kernels.gated_delta import reference
from rl_kernels.gated_delta.spec.cases_dimensions import DIMENSIONS
from rl_kernels.gated_delta.spec.illegal import ILLEGAL

CASES = (
    Case("plain", {"batch": 6, "width": 33}),
    Case("scaled", {"batch": 3, "width": 7}, {"scale": -2.5}),
    Case("wide", {"batch": 2, "width": 5000}, {"scale": 0.1}, suite="full"),
    *DIMENSIONS,
)

EMPTY = (Case("no-rows", {"batch": 0, "width": 7}),)


def inputs(case: Case, draw: Draw) -> Inputs:
    """Draw ``x[batch, width]`` and ``y``, and add the options of the case."""
    shape = case.sizes["batch"], case.sizes["width"]
    return {"x": draw.normal(*shape), "y": draw.normal(*shape), **case.options}


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the magnitudes of the terms of each result: |x| + |scale y|, and those of the gradients."""
    x, y, scale = call["x"], call["y"], abs(call.get("scale", 1.0))
    given_upstream = upstream.get("output", torch.zeros_like(x)).abs()
    gradients = {"gradient:x": given_upstream, "gradient:y": scale * given_upstream}
    return {"output": x.abs() + scale * y.abs(), **gradients}


ROWS = RowLayout(arguments={"x": 1, "y": 1}, results=frozenset({"output", "gradient:x", "gradient:y"}))

SPEC = Spec(
    cases=CASES,
    inputs=inputs,
    references={"": reference.gated_delta_rule},
    classes=dict.fromkeys(("output", "gradient:x", "gradient:y"), "elementwise"),
    differentiable=("x", "y"),
    magnitudes=magnitudes,
    transforms=ROWS.transforms(),
    illegal=ILLEGAL,
    empty=EMPTY,
    unread=frozenset({"backend"}),
)
