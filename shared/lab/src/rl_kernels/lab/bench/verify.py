"""Check a result against the definition in FP64 under the tolerance contract, one block of rows at a time.

The two rules of ``check.compare.accuracy`` are applied to blocks: the whole gold of a large call would not fit
into memory. Results with rows are compared block by block; results that are sums over rows are summed over the
blocks, then compared. Rows can also be experts of a mixture: then outputs are the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_kernels.core.contract import DTYPES, Tolerance, contract
from rl_kernels.core.testing import Inputs
from rl_kernels.lab.bench.arena import Arena
from rl_kernels.lab.check.candidate import readable
from rl_kernels.lab.check.compare import FACTORS, ROUNDING, fence_of, magnitudes_of, ulp
from rl_kernels.lab.check.guard import Results, named
from rl_kernels.lab.check.rows import RowLayout, Rows

BLOCK = 2**24
"""Elements of the widest tensor of a block: 128 MiB in FP64. A definition holds some twenty such tensors."""


class Wrong(Exception):
    """A result breaks the contract; the message says where and by how much."""


@dataclass
class Accuracy:
    """The two rules of accuracy, for a result that comes in pieces."""

    item: str
    tolerance: Tolerance
    factor: float
    share: float = 0.0
    _worst: float = -math.inf
    _plain: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def feed(self, value: torch.Tensor, eager: torch.Tensor, gold: torch.Tensor, magnitude: torch.Tensor) -> None:
        """Compare a piece with the gold; ``Wrong`` if it is outside the fence."""
        if value.shape != gold.shape:
            raise Wrong(f"{self.item}: expected shape {tuple(gold.shape)}, got {tuple(value.shape)}")
        flat = (tensor.reshape(-1).split(BLOCK) for tensor in (value, eager, gold, magnitude))
        for piece in zip(*flat, strict=True):
            self._feed(*piece)

    def _feed(self, value: torch.Tensor, eager: torch.Tensor, gold: torch.Tensor, magnitude: torch.Tensor) -> None:
        error = (value.double() - gold).abs()
        slack = ulp(gold, value.dtype) + ROUNDING * magnitude
        limit = fence_of(self.tolerance, gold, slack)
        if not bool((error <= limit).all()):
            at = int((~(error <= limit)).nonzero()[0])
            difference = f"got {float(value[at]):.9g}, expected {float(gold[at]):.9g}"
            raise Wrong(f"{self.item}: outside the contract's fence: {difference}, allowed {float(limit[at]):.3g}")
        plain = (eager.double() - gold).abs().nan_to_num()
        if value.numel():
            self.share = max(self.share, float((error / limit.clamp(min=1e-300)).max()))
            self._worst = max(self._worst, float((error - slack).max()))
            self._plain = max(self._plain, float(plain.max()))
        for i, tensor in enumerate((error, plain, slack)):
            self._squares[i] += float(tensor.square().sum())

    def finish(self) -> None:
        """Apply the relative rule, after the last piece; ``Wrong`` if it is broken."""
        if self._worst > self.factor * self._plain:
            raise Wrong(f"{self.item}: worse than {self.factor:g}x the worst element of eager PyTorch")
        error, plain, slack = map(math.sqrt, self._squares)
        if error > self.factor * plain + slack:
            raise Wrong(f"{self.item}: L2 error {error:.3g} over {self.factor * plain + slack:.3g} (relative rule)")


@dataclass
class Sums:
    """The definition's running sums of a result that is a sum over rows."""

    eager: torch.Tensor
    gold: torch.Tensor
    magnitude: torch.Tensor

    def add(self, eager: torch.Tensor, gold: torch.Tensor, magnitude: torch.Tensor) -> None:
        """Add the sums of a block."""
        self.eager += eager
        self.gold += gold
        self.magnitude += magnitude


def verify(
    arena: Arena, layout: RowLayout | None, results: Results, upstream: Results, arch: str, block: int = BLOCK
) -> float:
    """Check outputs and ``gradient:NAME`` of one call against the contract.

    Returns:
        the largest share of the contract's fence that an element used.

    Raises:
        Wrong: a result is missing, or less accurate than the contract demands.
    """
    rules = {item: _rule(arena, item, arch) for item in results}
    sums: dict[str, Sums] = {}
    for rows, gold, eager, magnitudes in _blocks(arena, layout, upstream, block):
        if gold.keys() != results.keys():
            raise Wrong(f"expected {', '.join(gold)}, got {', '.join(results)}")
        for item, value in results.items():
            # The definition computed on FP32 copies of the inputs; its results are rounded once, as eager's are.
            if layout is not None and item not in layout.results:
                terms = (eager[item], gold[item], magnitudes[item])
                sums[item].add(*terms) if item in sums else sums.update({item: Sums(*terms)})
                continue
            mine = value if rows is None else _flat_rows(value, gold[item])[rows]
            rules[item].feed(mine, eager[item].to(value.dtype), gold[item], magnitudes[item])
    for item, total in sums.items():
        rules[item].feed(results[item], total.eager.to(results[item].dtype), total.gold, total.magnitude)
    for rule in rules.values():
        rule.finish()
    return max(rule.share for rule in rules.values())


def _flat_rows(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the rows of a result; a result of another width stays as it is, so that its shape is found wrong."""
    row = like.shape[1:]
    return value.reshape(-1, *row) if value.shape[value.ndim - len(row) :] == row else value


def _rule(arena: Arena, item: str, arch: str) -> Accuracy:
    direction = "gradient" if item.startswith("gradient:") else "forward"
    op_class = arena.spec.classes.get(item)
    if op_class is None:
        raise Wrong(f"{item} is not a result of the operator")
    return Accuracy(item, contract().tolerance("accuracy", op_class, arena.dtype, direction, arch), FACTORS[direction])


Block = tuple[slice | None, Results, Results, Mapping[str, torch.Tensor]]


def _blocks(arena: Arena, layout: RowLayout | None, upstream: Results, block: int) -> Iterator[Block]:
    """Yield, for each block of rows, its position, the definition in FP64 and in FP32, and the magnitudes."""
    spec, inputs = arena.spec, _definition_inputs(arena)
    rows = None if layout is None else Rows(layout, inputs)
    shared = {name: value for name, value in inputs.items() if rows is not None and name not in rows.flat}
    # Inputs shared by all blocks, such as a weight, are cast once.
    wide, plain = (_cast_floats(shared, dtype) for dtype in (torch.float64, torch.float32))
    whole = (None, inputs, upstream)
    for position, part, upstream_part in [whole] if rows is None else _row_blocks(arena, rows, upstream, block):
        golden, up = {**wide, **_cast_floats(part, torch.float64)}, _cast_floats(upstream_part, torch.float64)
        eager = _run_definition(
            arena, {**plain, **_cast_floats(part, torch.float32)}, _cast_floats(upstream_part, torch.float32)
        )
        magnitudes = magnitudes_of(spec, arena.case, golden, up, DTYPES[arena.dtype])
        yield position, _run_definition(arena, golden, up), eager, magnitudes


def _definition_inputs(arena: Arena) -> Inputs:
    """Return the definition's arguments without output dtypes: neither gold nor eager is rounded here."""
    inputs = readable(arena.spec, arena.inputs)
    return {name: value for name, value in inputs.items() if not isinstance(value, torch.dtype)}


def _cast_floats(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _row_blocks(arena: Arena, rows: Rows, upstream: Results, block: int) -> Iterator[tuple[slice, Inputs, Results]]:
    """Yield blocks of rows, and of the upstream gradients that belong to them."""
    upstream_rows = {
        name: value.reshape(rows.count, *value.shape[_leading_dims(rows) :])
        for name, value in upstream.items()
        if name in rows.layout.results
    }
    widest = max(*arena.case.sizes.values(), *(value[0].numel() for value in rows.flat.values()))
    step = max(1, block // widest)
    for start in range(0, rows.count, step):
        block_rows = slice(start, min(start + step, rows.count))
        part = {name: value[block_rows] for name, value in rows.flat.items()}
        if rows.layout.naming is not None:
            part[rows.layout.naming] = _named_within(rows.inputs[rows.layout.naming], block_rows)
        yield block_rows, part, {**upstream, **{n: v[block_rows] for n, v in upstream_rows.items()}}


def _named_within(names: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the names that rows have within their block; rows outside have the name of none."""
    count = rows.stop - rows.start
    return torch.where((names >= rows.start) & (names < rows.stop), names - rows.start, count)


def _leading_dims(rows: Rows) -> int:
    name = next(iter(rows.flat))
    return rows.inputs[name].ndim - rows.layout.arguments[name]


def _run_definition(arena: Arena, inputs: Inputs, upstream: Results) -> Results:
    """Return outputs and gradients of the definition."""
    reference: Callable[..., Any] = arena.spec.references[arena.case.function]
    return call(reference, arena.spec.output, inputs, arena.leaves if upstream else [], upstream)


def call(function: Callable[..., Any], output: str, inputs: Inputs, leaves: list[str], upstream: Results) -> Results:
    """Call an implementation; return its outputs and, given upstream gradients, ``gradient:NAME`` of the leaves."""
    attached = {name: inputs[name].detach().requires_grad_() for name in leaves}
    with torch.set_grad_enabled(bool(upstream)):
        outputs = named(function(**{**inputs, **attached}), output)
    results = {name: value.detach() for name, value in outputs.items()}
    if upstream:
        grads = torch.autograd.grad([outputs[name] for name in upstream], [*attached.values()], [*upstream.values()])
        results |= {f"gradient:{name}": grad for name, grad in zip(attached, grads, strict=True)}
    return results
