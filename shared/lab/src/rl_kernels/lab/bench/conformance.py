"""The tests of an operator's benchmark; each package runs them by subclassing ``BenchConformance`` in its tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from rl_kernels.core.operator import Operator
from rl_kernels.lab.bench import cli
from rl_kernels.lab.bench.definition import GOALS, HOST, SMALL, Benchmark, Shape, bench_of
from rl_kernels.lab.bench.environment import installed
from rl_kernels.lab.bench.measure import EVENTS, GRAPH, WALL
from rl_kernels.lab.bench.record import OURS, Record, read


class BenchConformance:
    """Runs the command on tiny shapes, with stand-ins for the peers that are not installed.

    Attributes:
        operator: the operator that is benchmarked.
        tiny: shapes that take no time.
        peers: peers that agree with our results on these shapes, with the stand-ins in ``modules``.
        dtypes: dtypes in which they agree.
        modules: module name -> stand-ins for its members: functions with the signatures of the peer's.
    """

    operator: ClassVar[Operator]
    tiny: ClassVar[Sequence[Shape]]
    peers: ClassVar[Sequence[str]] = ("eager",)
    dtypes: ClassVar[Sequence[str]] = ("fp32", "bf16")
    modules: ClassVar[Mapping[str, Mapping[str, Callable[..., Any]]]] = {}

    @pytest.fixture
    def bench(self, tmp_path: Path, device: torch.device) -> Callable[..., list[Record]]:
        """Return a function that runs the command and returns its records."""

        def run(*arguments: str) -> list[Record]:
            file = tmp_path / "bench.json"
            common = ("--op", self.operator.name, "--device", device.type, "--iters", "1", "--warmup", "0")
            assert cli.main([*common, "--json", str(file), *arguments]) == 0
            return read(file).records

        return run

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark under test."""
        return bench_of(self.operator)

    def test_results_hold_and_peers_agree(
        self, bench: Callable[..., list[Record]], device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every implementation is timed on each of its passes: it was called correctly, and its result is right."""
        for name, members in self.modules.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[0]))
            vars(sys.modules[name]).update(members)
        monkeypatch.setitem(self.benchmark.sets, "tiny", self.tiny)
        records = bench("--set", "tiny", "--compare", ",".join(self.peers), "--dtype", *self.dtypes)
        assert len(records) == len(self.tiny) * (1 + len(self.peers)) * len(self.dtypes)
        for record in records:
            peer = self.benchmark.peers.get(record.implementation)
            shape = next(shape for shape in self.tiny if shape.label == record.shape)
            expected = (peer and peer.passes) or list(self.benchmark.passes(shape, 4))
            assert list(record.passes) == list(expected), (record.implementation, record.skipped)
            assert record.checked or (peer is not None and not peer.checked)
            clocks = {measured.timing.how for measured in record.passes.values()}
            assert clocks == {WALL if device.type != "cuda" else EVENTS if peer and peer.waits else GRAPH}

    def test_what_is_not_installed_is_named(self, bench: Callable[..., list[Record]]) -> None:
        """A peer that is not installed is skipped, with what to install; ours is still timed."""
        absent = [name for name, peer in self.benchmark.peers.items() if peer.package]
        shape = "x".join(map(str, self.tiny[0].sizes))
        records = bench("--shapes", shape, "--compare", ",".join(absent) or "none")
        assert records[0].implementation == OURS
        assert records[0].passes
        for record in records[1:]:
            package = self.benchmark.peers[record.implementation].package
            if installed(package) is None:
                assert record.skipped[""].endswith(f" is not installed: pip install {package}")

    def test_every_shape_is_well_formed(self) -> None:
        """Sizes, passes, work and names of peers are consistent, for the shapes of a GPU too; labels are unique."""
        bench = self.benchmark
        assert {GOALS, SMALL, HOST} <= bench.sets.keys()
        for shapes in bench.sets.values():
            assert len({shape.label for shape in shapes}) == len(shapes)
            for shape in shapes:
                assert len(shape.sizes) == len(bench.shape)
                assert shape.without <= bench.peers.keys()
                passes = bench.passes(shape, 2)
                assert all(pass_.work.bytes > 0 for pass_ in passes.values())
                assert all(set(peer.passes) <= passes.keys() for peer in bench.peers.values())
