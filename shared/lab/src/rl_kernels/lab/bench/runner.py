"""Run a plan: for each shape, verify our result, time it, verify it again, then time the peers in turn with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import BackendUnavailable, record_dispatch
from rl_kernels.core.operator import Operator, arch_of
from rl_kernels.core.testing import Case, Inputs, spec_of
from rl_kernels.core.testing.grouped import grouped, own_parameters
from rl_kernels.lab.bench.arena import Arena
from rl_kernels.lab.bench.definition import Benchmark, Pass, Peer, Shape
from rl_kernels.lab.bench.measure import (
    GRAPH,
    Calls,
    Ceilings,
    Clock,
    Effort,
    Measurement,
    Run,
    call_seconds,
    measure,
)
from rl_kernels.lab.bench.peers import LOOSE, Skipped, difference, function_from, one_line, skipped_on_error
from rl_kernels.lab.bench.record import OURS, Measured, Record
from rl_kernels.lab.bench.verify import Wrong, call, verify
from rl_kernels.lab.check.guard import Misbehaved, Results, named

Function = Callable[..., Any]


@dataclass(frozen=True)
class Ours:
    """A public function, called with the inputs of a case: members of a group are separate arguments there."""

    public: Function
    groups: Mapping[str, type]
    always: Inputs

    def __call__(self, **inputs: Any) -> Any:
        """Call the public function."""
        return self.bind(inputs)()

    def bind(self, inputs: Inputs) -> Run:
        """Return the call that a user makes with these inputs, without the work of grouping arguments."""
        return functools.partial(self.public, **grouped(own_parameters(self.public), self.groups, self.always | inputs))


def _bind(function: Function, inputs: Inputs) -> Run:
    return function.bind(inputs) if isinstance(function, Ours) else functools.partial(function, **inputs)


@dataclass(frozen=True)
class Job:
    """One operator on one shape in one dtype."""

    operator: Operator
    benchmark: Benchmark
    shape: Shape
    dtype: str
    device: torch.device
    backend: str
    peers: Mapping[str, Peer]
    effort: Effort
    options: Mapping[str, float] = field(default_factory=dict)
    """Options given on the command line; the shape has them already."""

    def passes(self) -> dict[str, Pass]:
        """Return the timed passes by name."""
        return dict(self.benchmark.passes(self.shape, DTYPES[self.dtype].itemsize))

    def arena(self, case: Case) -> Arena:
        """Return the inputs of one case."""
        return Arena(spec_of(self.operator), case, self.dtype, self.device)

    def record(self, implementation: str, note: str = "") -> Record:
        """Return an empty record."""
        shape = self.shape
        identity = (self.operator.name, shape.label, shape.sizes, shape.group, self.dtype)
        tokens = 0 if self.benchmark.tokens is None else self.benchmark.tokens(shape)
        return Record(*identity, implementation, note=note, options=dict(self.options), tokens=tokens)


@dataclass
class Round:
    """One case of a job: its passes, its inputs, and our verified result, which peers are compared with."""

    job: Job
    passes: Mapping[str, Pass]
    ceilings: Ceilings
    arena: Arena
    ours: Results = field(default_factory=dict)
    upstream: Results = field(default_factory=dict)
    function: Function | None = None
    measured: dict[str, Measurement] = field(default_factory=dict)
    """Our measurements by pass; a graph keeps the results of its calls."""

    @property
    def has_backward(self) -> bool:
        """Whether a pass of this case includes the backward."""
        return any(pass_.backward for pass_ in self.passes.values())

    @functools.cached_property
    def results_for_ones(self) -> Results:
        """Our result for an upstream gradient of ones, which a peer that returns a sum is compared with."""
        assert self.function is not None
        ones = {name: torch.ones_like(value) for name, value in self.upstream.items()}
        results = self.result(self.function, self.arena.inputs, ones)
        return {name: results[name] if name.startswith("gradient:") else results[name].sum() for name in results}

    def verify(self, results: Results, upstream: Results) -> float:
        """Check results against the contract; return the largest share of its fence that was used."""
        device, layouts = self.job.device, self.job.benchmark.rows
        arch = arch_of(device.type, device.index)
        return verify(self.arena, layouts.get(self.arena.case.function), results, upstream, arch)

    def on_backend(self, backend: str) -> Ours:
        """Return our function on a backend, without validation: the inputs are known to be right."""
        unchecked = {"validate": False} if "validate" in self.arena.spec.unread else {}
        public = self.job.operator.function(self.arena.case.function)
        # Avoid a reference to this round: a cycle keeps its memory until the garbage collector runs.
        return Ours(public, self.arena.spec.groups, {"backend": backend, **unchecked})

    def result(self, function: Function, inputs: Inputs, upstream: Results) -> Results:
        """Call an implementation once."""
        return call(function, self.arena.spec.output, inputs, self.arena.leaves if upstream else [], upstream)


def run(job: Job, ceilings: Ceilings) -> list[Record]:
    """Return the records of a job: ours first, then one for each peer."""
    ours = job.record(OURS)
    records = {name: job.record(name, peer.note) for name, peer in job.peers.items()}
    cases: list[Case] = []
    passes = job.passes()
    for pass_ in passes.values():
        if pass_.case not in cases:
            cases.append(pass_.case)
    for case in cases:
        mine = {name: pass_ for name, pass_ in passes.items() if pass_.case == case}
        round_ = Round(job, mine, ceilings, job.arena(case))
        _run_ours(round_, ours)
        for name, record in records.items():
            # Skip peers if our own result failed: there is nothing to check theirs against.
            if round_.measured and not ours.wrong:
                _run_peer(round_, job.peers[name], record)
        round_.measured.clear()
        _release(job.device)
    return [ours, *(record for record in records.values() if record.passes or record.skipped or record.wrong)]


def _run_ours(round_: Round, record: Record) -> None:
    arena = round_.arena
    function = round_.on_backend(round_.job.backend)
    try:
        _verify(round_, function, record)
        for name, pass_ in round_.passes.items():
            measurement = _time_pass(round_, function, pass_, arena.copies, round_.upstream)
            _check_bits(round_, pass_, measurement.result)
            round_.measured[name] = measurement
            record.passes[name] = Measured.of(measurement.timing, pass_.work, round_.ceilings, None)
    except BackendUnavailable as error:
        record.skipped[""] = str(error)
    except torch.OutOfMemoryError as error:
        record.skipped[", ".join(round_.passes)] = one_line(error)
    except (Wrong, Misbehaved) as error:
        record.wrong, record.passes = str(error), {}
    except Exception as error:  # Record it, and go on with the next shape.
        record.wrong, record.passes = one_line(error), {}


def _verify(round_: Round, function: Function, record: Record) -> None:
    """Check our result against the contract, and store it in the round."""
    arena = round_.arena
    with record_dispatch() as log:
        with torch.set_grad_enabled(round_.has_backward):
            attached = {name: arena.inputs[name].detach().requires_grad_() for name in arena.leaves}
            outputs = named(function(**{**arena.inputs, **attached}), arena.spec.output)
        record.backend = log[-1].backend if log else round_.job.backend
    round_.upstream = arena.upstream(outputs) if round_.has_backward else {}
    round_.ours = {name: value.detach() for name, value in outputs.items()}
    if round_.upstream:
        through = [outputs[name] for name in round_.upstream]
        grads = torch.autograd.grad(through, list(attached.values()), list(round_.upstream.values()))
        round_.ours |= {f"gradient:{name}": grad for name, grad in zip(attached, grads, strict=True)}
    round_.function = function
    del outputs, attached
    share = round_.verify(round_.ours, round_.upstream)
    record.checked[", ".join(round_.passes)] = f"FP64 definition, {share:.2g} of the contract's fence"


def _check_bits(round_: Round, pass_: Pass, last: Any) -> None:
    """Check that the last timed call gave the verified bits, or else verify its result too."""
    results = _results(round_, pass_, last)
    before = {name: value for name, value in round_.ours.items() if name in results}
    if all(torch.equal(value, before[name]) for name, value in results.items()):
        return
    if pass_.backward:
        results = {**before, **results}
    round_.verify(results, round_.upstream if pass_.backward else {})


def _results(round_: Round, pass_: Pass, result: Any) -> Results:
    if not pass_.backward:
        return {name: value.detach() for name, value in named(result, round_.arena.spec.output).items()}
    return {f"gradient:{name}": grad for name, grad in zip(round_.arena.leaves, result, strict=True)}


def _time_pass(
    round_: Round,
    function: Function,
    pass_: Pass,
    copies: Sequence[Inputs],
    upstream: Results,
    *,
    captured: bool = True,
    beside: Clock | None = None,
) -> Measurement:
    runs = [
        _forward_and_backward(round_, function, inputs, upstream) if pass_.backward else _bind(function, inputs)
        for inputs in copies
    ]
    with torch.set_grad_enabled(pass_.backward):
        return measure(runs, round_.job.device, round_.job.effort, captured=captured, beside=beside)


def _forward_and_backward(round_: Round, function: Function, inputs: Inputs, upstream: Results) -> Run:
    attached = {name: inputs[name].detach().requires_grad_() for name in round_.arena.leaves}
    forward, leaves = _bind(function, {**inputs, **attached}), list(attached.values())
    names, upstream_values, output = list(upstream), list(upstream.values()), round_.arena.spec.output

    def run() -> Any:
        result = forward()
        outputs = [result] if isinstance(result, torch.Tensor) else [named(result, output)[name] for name in names]
        if _is_captured():
            return torch.autograd.grad(outputs, leaves, upstream_values)
        # A training step calls this; its host time differs from that of torch.autograd.grad.
        torch.autograd.backward(outputs, upstream_values)
        return tuple(map(_take_gradient, attached, leaves))

    return run


def _is_captured() -> bool:
    """Return whether a CUDA graph is being captured; it runs the same kernels, and keeps their results."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _take_gradient(name: str, leaf: torch.Tensor) -> torch.Tensor:
    grad, leaf.grad = leaf.grad, None
    if grad is None:
        raise RuntimeError(f"no gradient reached {name}")
    return grad


def _run_peer(round_: Round, peer: Peer, record: Record) -> None:
    """Time a peer on its passes; the record has the reason if it could not run."""
    passes = {name: pass_ for name, pass_ in round_.passes.items() if name in (peer.passes or round_.passes)}
    if record.skipped.get("") or record.wrong or not passes:
        return
    try:
        function = round_.on_backend(peer.backend) if peer.backend else function_from(peer)
    except Skipped as error:
        record.skipped[""] = str(error)
        return
    try:
        with skipped_on_error():
            with peer.around():
                upstream = _check_peer(round_, peer, function, record, any(pass_.backward for pass_ in passes.values()))
            copies = round_.arena.copies
            if peer.overwrites:
                copies = [_cloned(inputs) for inputs in copies]
            for name, pass_ in passes.items():
                ours = round_.measured.get(name)
                # Our plain calls would run under the settings of the peer; a captured graph is not affected.
                beside = ours.clock if ours and ours.clock and ours.clock.how == GRAPH else None
                with peer.around():
                    measurement = _time_pass(
                        round_, function, pass_, copies, upstream, captured=not peer.waits, beside=beside
                    )
                record.passes[name] = _measured_beside(round_, pass_, measurement, peer, ours)
    except Skipped as error:
        record.skipped[", ".join(name for name in passes if name not in record.passes)] = str(error)
    _release(round_.job.device)


def _measured_beside(
    round_: Round, pass_: Pass, measurement: Measurement, peer: Peer, ours: Measurement | None
) -> Measured:
    """Return the measurement of a peer, with its real calls timed again in turn with ours."""
    if ours is None:
        return Measured.of(measurement.timing, pass_.work, round_.ceilings, None)
    sides = [Calls(measurement.runs, peer.around), Calls(ours.runs)]
    with torch.set_grad_enabled(pass_.backward):
        theirs, mine = call_seconds(sides, round_.job.device, round_.job.effort)
    timing = replace(measurement.timing, call_us=theirs * 1e6)
    return Measured.of(timing, pass_.work, round_.ceilings, ours.timing, mine / theirs)


def _check_peer(round_: Round, peer: Peer, function: Function, record: Record, backward: bool) -> Results:
    """Compare a peer roughly with our result; return its upstream gradients."""
    upstream, ours = (round_.upstream if backward else {}), round_.ours
    if not peer.checked:
        return upstream
    if peer.scalar:
        upstream = {name: value.new_ones(()) for name, value in upstream.items()}
        ours = round_.results_for_ones
    inputs = _cloned(round_.arena.inputs) if peer.overwrites else round_.arena.inputs
    results = round_.result(function, inputs, upstream)
    name, share = difference(results, ours)
    record.checked[", ".join(round_.passes)] = f"our result, off by {share:.2g} of its norm in {name}"
    if share > LOOSE:
        record.wrong = f"{name} differs from ours by {share:.2g} of its norm"
        raise Skipped(f"wrong: {record.wrong}")
    return upstream


def _cloned(inputs: Inputs) -> Inputs:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
