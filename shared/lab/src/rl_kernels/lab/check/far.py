"""The rule of offsets: operands whose elements are far apart in memory change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.core.operator import Operator
from rl_kernels.core.testing import Case, Draw, Inputs, far, function_of, spec_of
from rl_kernels.lab.check.guard import Results, named
from rl_kernels.lab.check.rules import device

UPSTREAM, MAIN_GRAD = "upstream of ", "main_grad of "


class FarApart:
    """Checks that no backend cuts the offset of an element to 32 bits, in the forward and the backward pass."""

    operator: ClassVar[Operator]
    far: ClassVar[Sequence[Case]] = ()
    """Small cases. Where a dim has two elements, its stride is 2^31; where it has three, an index times it is."""

    def test_elements_beyond_an_offset_of_32_bits(self, backend: str, far_case: Case) -> None:
        """Each operand, upstream gradient and ``main_grad`` comes far apart, along one dim at a time."""
        spec, draw = spec_of(self.operator), Draw(torch.float16, device(), seed=7)
        operands = spec.inputs(far_case, draw)
        for name in spec.main_grad & operands.keys() if far_case.grad else ():
            operands[MAIN_GRAD + name] = torch.ones_like(operands[name], dtype=torch.float32)
        try:
            outputs = self._results(backend, far_case, operands)
        except BackendUnavailable as error:
            pytest.skip(str(error))
        differentiable = {name: output for name, output in outputs.items() if output.requires_grad}
        for name, output in differentiable.items():
            operands[UPSTREAM + name] = draw.normal(*output.shape, dtype=output.dtype)
        expected = self._results(backend, far_case, operands)
        for name, operand in operands.items():
            if isinstance(operand, torch.Tensor) and (operand.is_floating_point() or operand.dtype == torch.bool):
                for dim in (dim for dim, size in enumerate(operand.shape) if size > 1):
                    results = self._results(backend, far_case, {**operands, name: far(operand, dim)})
                    for key, value in expected.items():
                        assert torch.equal(results[key], value), f"{key}, {name} far apart along dim {dim}"

    def _results(self, backend: str, case: Case, operands: Inputs) -> Results:
        """Return the outputs of a call and, with upstream gradients, those of its operands; nothing stays written."""
        spec = spec_of(self.operator)
        written = {name: operands[name].clone() for name in operands if name in spec.writes or MAIN_GRAD in name}
        call = {name: value for name, value in operands.items() if not name.startswith((UPSTREAM, MAIN_GRAD))}
        needed = [name for name in spec.differentiable if case.grad and name in call]
        leaves = {name: call[name].detach().requires_grad_() for name in needed}
        for name in needed:
            if MAIN_GRAD + name in operands:
                leaves[name].main_grad = operands[MAIN_GRAD + name]
            call[name] = leaves[name] * 1 if name in spec.overwritten(call) else leaves[name]
        results = named(function_of(self.operator, case.function)(**call, backend=backend), spec.output)
        upstream = {name: operands[UPSTREAM + name] for name in results if UPSTREAM + name in operands}
        if not upstream and needed:
            return results
        if upstream:
            torch.autograd.backward([results[name] for name in upstream], list(upstream.values()))
        results = {name: result.detach().clone() for name, result in results.items()}
        results |= {f"gradient:{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        for name, value in written.items():
            results[name] = operands[name].clone()
            operands[name].copy_(value)
        return results
