"""The interface of a candidate's call, made in this process (``run``) or in the candidate's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from rl_kernels.core.testing.spec import Inputs
from rl_kernels.lab.check.guard import Results


class Ran(Protocol):
    """One call of a candidate, in this process or in its own."""

    @property
    def inputs(self) -> Inputs:
        """The arguments as they are after the call."""

    @property
    def outputs(self) -> Results:
        """The results of the call."""

    @property
    def attached(self) -> Collection[str]:
        """Names of the outputs that carry a gradient."""

    @property
    def kept(self) -> Results:
        """Outputs and gradients as they are now, which a later call must not have changed."""

    def gradients(self, upstream: Mapping[str, torch.Tensor], *, again: bool = False) -> Results:
        """Return ``gradient:NAME`` for each differentiable input; ``again`` keeps the graph for a further pass."""

    def spoil(self) -> None:
        """Write into the gradients of the last pass, which are the caller's own."""

    def results(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Return outputs and, if there is an upstream gradient, gradients."""

    def updated(self, inputs: Inputs, upstream: Mapping[str, torch.Tensor], *, silently: bool) -> Results:
        """Write other values into the same tensors and call again: its results.

        ``silently`` writes them without a new version of the tensors, as a kernel of another library would.
        """

    def scribbled(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Write into every output and gradient, which are the caller's own, and call again: its results."""

    def two_at_once(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Call twice before the backward pass of either: the gradients after both."""

    def renewed(self, upstream: Mapping[str, torch.Tensor]) -> Results:
        """Give each leaf with a buffer ``main_grad`` another one, and call again: the gradients."""

    def written(self, name: str, value: torch.Tensor, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Write into an argument before the backward pass: the gradients, or the error that refuses them."""

    def second_order(self, upstream: Mapping[str, torch.Tensor]) -> Results | str:
        """Return the gradients of half the squared norm of the gradients, or the error that refuses them."""

    def forward_mode(self) -> Results | str:
        """Return the outputs' tangents for tangents of ones, or the error that refuses them."""
