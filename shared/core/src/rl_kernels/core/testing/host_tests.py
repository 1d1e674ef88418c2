"""Tests of a backend's host code without a GPU: its launches are recorded, and bugs planted in it must show.

The tests of an operator subclass ``TritonHost``, or ``CudaHost`` for CUDA C++::

    class TestLaunches(TritonHost):
        modules = ("rl_kernels.norm.backends.triton.backend",)
        bugs = (Bug("a program short", "ceil_div(count, rows)", "count // rows"),)
        stand_ins = {"forward": forward}
        calls = (dict(rows=37, size=4096), ...)

        def check(self, call, backend, recorder): ...

A stand-in computes with a few lines of PyTorch what the launch asks of its kernel, and ``check`` compares what the
backend returns with the definition.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch

from rl_kernels.core.testing.launches import Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.state import poisoned_empty
from rl_kernels.core.testing.triton_launches import ALIGNED, TritonRecorder


class HostTests:
    """The tests that both kinds of backends share.

    Attributes:
        modules: the host code, each module before those that import it; the last one has the backend's raw functions.
        bugs: each must let ``check`` fail for one of the calls.
        calls: what ``check`` is called with.
        stand_ins: kernel name -> function that is called with each launch of this kernel, in its place.
        options: of the recorder: ``arch`` and ``processors`` of the simulated GPU.
        failures: errors that a bug may lead to.
    """

    modules: ClassVar[Sequence[str]]
    bugs: ClassVar[Sequence[Bug]]
    calls: ClassVar[Sequence[Any]]
    stand_ins: ClassVar[Mapping[str, Callable[..., None]]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    failures: ClassVar[tuple[type[Exception], ...]] = (AssertionError, RuntimeError)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test by the planted bugs."""
        if "planted_bug" in metafunc.fixturenames:
            metafunc.parametrize("planted_bug", cls.bugs, ids=lambda bug: bug.name)

    def recorder(self, call: Any) -> Any:
        """Return the recorder for a call."""
        raise NotImplementedError

    def recording(self, recorder: Any, bug: Bug | None = None) -> Any:
        """Return a context in which launches are recorded, of host code with a planted bug or without."""
        raise NotImplementedError

    def check(self, call: Any, backend: Any, recorder: Any) -> None:
        """Make a call of the backend's raw functions, and check the results and the launches."""
        raise NotImplementedError

    def check_all(self, recorders: Sequence[Any]) -> None:
        """Check the launches of all calls together; by default nothing."""

    def run(self, bug: Bug | None = None) -> None:
        """Check all calls."""
        recorders = []
        for call in self.calls:
            torch.manual_seed(0)
            recorders.append(recorder := self.recorder(call))
            with self.recording(recorder, bug), poisoned_empty():
                self.check(call, importlib.import_module(self.modules[-1]), recorder)
        self.check_all(recorders)

    @pytest.mark.smoke
    def test_launches_match_the_calls(self) -> None:
        """Each launch has the arguments from which its kernel computes the definition."""
        self.run()

    def test_planted_bug_shows(self, planted_bug: Bug) -> None:
        """A bug in the host code lets a check fail."""
        with pytest.raises(self.failures):
            self.run(planted_bug)


class CudaHost(HostTests):
    """Tests of the host code of a backend in CUDA C++.

    Attributes:
        watched: the modules that import what uses the GPU; by default the backend's own.
    """

    watched: ClassVar[Sequence[str]] = ()

    def recorder(self, call: Any) -> Recorder:
        """Return the recorder for a call."""
        return Recorder(self.stand_ins, **self.options)

    @contextmanager
    def recording(self, recorder: Recorder, bug: Bug | None = None) -> Iterator[None]:
        """Record launches, of host code with a planted bug or without."""
        watched = self.watched or self.modules[-1:]
        with nullcontext() if bug is None else planted(self.modules, bug), recorder.watching(*watched):
            yield


class TritonHost(HostTests):
    """Tests of the host code of a backend in Triton; a call that is a dict may name an ``arch``."""

    def recorder(self, call: Any) -> TritonRecorder:
        """Return the recorder for a call."""
        arch = {"arch": call["arch"]} if isinstance(call, dict) and "arch" in call else {}
        return TritonRecorder(self.stand_ins, **self.options, **arch)

    @contextmanager
    def recording(self, recorder: TritonRecorder, bug: Bug | None = None) -> Iterator[None]:
        """Record launches, of host code with a planted bug or without."""
        with recorder.pretended():
            # A compiled kernel is used again at most addresses: one for another kind of arguments then shows.
            importlib.import_module("rl_kernels.core.triton_lib.launch").ALIGNMENT = ALIGNED  # type: ignore[attr-defined]
            with nullcontext() if bug is None else planted(self.modules, bug):
                yield
