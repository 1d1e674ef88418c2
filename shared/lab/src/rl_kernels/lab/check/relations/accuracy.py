"""Relations of values: outputs and gradients compared with the definition in FP64."""

from __future__ import annotations

from collections.abc import Iterator

from rl_kernels.lab.check import compare
from rl_kernels.lab.check.cell import Cell
from rl_kernels.lab.check.guard import Misbehaved, Results
from rl_kernels.lab.check.ran import Ran
from rl_kernels.lab.check.relations.derivatives import derivatives
from rl_kernels.lab.check.relations.main_grad import main_grad
from rl_kernels.lab.check.result import Record
from rl_kernels.lab.check.run import PLAIN
from rl_kernels.lab.check.surroundings import Surroundings
from rl_kernels.lab.check.upstreams import Upstream, upstreams


def accuracy(cell: Cell) -> Iterator[Record]:
    """Compare outputs with the gold in FP64: shape, dtype, the contract's fence and the relative rule.

    Then do the same on other values of the same shapes, which catches results left over from an earlier call.
    """
    for label, drawn in {"": cell, " other values": cell.redrawn()}.items():
        try:
            # The very first call runs in inference mode, as in a rollout: what it caches must also work for training.
            outputs = drawn.run(leaves=[], around=PLAIN if label else Surroundings(inference=True)).outputs
        except Misbehaved as error:
            yield drawn.failed("accuracy", "forward" + label, error)
            return
        plain = Upstream(label, {})
        yield from _check_accuracy(drawn, "accuracy", plain, outputs, drawn.eager().outputs, drawn.gold().outputs)


def gradients(cell: Cell) -> Iterator[Record]:
    """Compare gradients with the gold's, for every kind of upstream gradient.

    Then compare them through one output alone, of one argument alone, and without one output and one argument.
    """
    eager = cell.eager()
    upstream = cell.upstream(eager)
    if not upstream:
        yield cell.skip("gradients", "no output carries a gradient")
        return
    gold = cell.gold()
    exact = gold.gradients({name: value.double() for name, value in upstream.items()}, again=True)
    peak = max((float(value.nan_to_num().abs().amax()) for value in exact.values() if value.numel()), default=0.0)
    for variant in upstreams(cell, upstream, peak):
        yield from _gradients(cell, variant, cell.leaves, eager, gold, None if variant.label else exact)
    if not cell.is_brief:
        for name in cell.some(list(upstream)) if len(upstream) > 1 else ():
            alone = Upstream(f" through {name} alone", {name: upstream[name]})
            yield from _gradients(cell, alone, cell.leaves, eager, gold)
        for name in cell.some(cell.leaves) if len(cell.leaves) > 1 else ():
            yield from _gradients(cell, Upstream(" alone", upstream), [name], eager, gold)
        yield from derivatives(cell)
    yield from _without_one(cell, upstream, eager, gold)
    yield from main_grad(cell, upstream)


def _without_one(cell: Cell, upstream: Results, eager: Ran, gold: Ran) -> Iterator[Record]:
    """Omit one output and one argument, chosen by the case, where there are more than two."""
    draw = cell.draw(salt=3)

    def but_one(names: list[str]) -> list[str]:
        left_out = draw.integer(0, len(names)) if len(names) > 2 else None
        return [name for place, name in enumerate(names) if place != left_out]

    outputs, leaves = but_one(list(upstream)), but_one(cell.leaves)
    if (len(outputs), len(leaves)) != (len(upstream), len(cell.leaves)):
        label = f" of {' and '.join(leaves)} through {' and '.join(outputs)}"
        variant = Upstream(label, {name: upstream[name] for name in outputs})
        yield from _gradients(cell, variant, leaves, eager, gold)


def _gradients(
    cell: Cell, variant: Upstream, leaves: list[str], eager: Ran, gold: Ran, known: Results | None = None
) -> Iterator[Record]:
    """Compare the gradients of ``leaves`` for an upstream gradient; ``known`` are the gold's, if computed before."""
    try:
        results = cell.run(leaves=leaves).gradients(variant.values)
    except Misbehaved as error:
        yield cell.failed("gradients", "backward" + variant.label, error)
        return
    names = {f"gradient:{name}" for name in leaves}
    exact = {name: value.double() for name, value in variant.defined.items()}
    plain = eager.gradients(variant.defined, again=True).items()
    expected = {name: value for name, value in plain if name in names}
    golds = gold.gradients(exact, again=True) if known is None else known
    yield from _check_accuracy(cell, "gradients", variant, results, expected, golds)


def _check_accuracy(
    cell: Cell, relation: str, variant: Upstream, results: Results, eager: Results, gold: Results
) -> Iterator[Record]:
    if results.keys() != eager.keys():
        yield cell.failed(relation, "results" + variant.label, f"expected {', '.join(eager)}, got {', '.join(results)}")
        return
    magnitudes = cell.magnitudes({name: value.double() for name, value in variant.defined.items()})
    direction = "forward" if relation == "accuracy" else "gradient"
    for item, value in results.items():
        row_key = ("accuracy", item, eager[item].dtype)
        # A gradient is linear in its upstream, and so is its allowed error.
        rows = cell.tolerance(*row_key), cell.general(*row_key)
        tolerance, general = (row._replace(atol=row.atol * max(1.0, variant.scale)) for row in rows)
        rounding = compare.ROUNDING_FP64 if cell.dtype_name == "fp64" else compare.ROUNDING
        # The fence was calibrated on the named cases.
        calibrated = not cell.case.relations
        operands = (value, eager[item], gold[item], magnitudes[item], tolerance, direction, rounding)
        comparison = compare.accuracy(*operands, calibrated=calibrated, row=general)
        yield cell.record(relation, item + variant.label, tuple(value.shape), tolerance, comparison, cell.row(*row_key))
