"""Count what runs on the host from a call to its launches, on any machine: `python tools/call_path.py`.

Kernels are recorded instead of launched (``core.testing``), so no GPU and no Triton is needed. For each operator and
backend the first table has, of the second call of a kind: our functions that run, the most frames of ours between the
caller, or autograd, and a launch, and the files of these frames. ``native`` launches nothing: its frames end at the
first function of its module. The second table has the arguments of each public function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from rl_kernels.core.command import Parser, writable, write_json
from rl_kernels.core.dispatch import without_canaries
from rl_kernels.core.operator import Backend
from rl_kernels.core.registry import kernel_registry
from rl_kernels.core.testing.launches import Recorder
from rl_kernels.core.testing.triton_launches import ALIGNED, TritonRecorder
from rl_kernels.lab.bench.report import as_table

OWN, TESTING = "rl_kernels/", "core/testing/"
GPU = ("kernel", "tensor_map", "processors")
"""What modules import to use a GPU; ``Recorder`` replaces it."""
BOTH = ("cuda-sm90", "triton", "native")
BACKENDS = {
    "rms_norm": BOTH[1:],
    "fused_logp": ("cuda-generic", *BOTH[1:]),
    "linear_logp": BOTH,
    "det_linear": BOTH,
    "det_attention": BOTH,
    "grpo_loss": BOTH[1:],
    "experts": BOTH,
    "route": BOTH,
    "gated_delta_rule": BOTH,
}
OPERATORS = {"det_linear": "det_gemm", "route": "experts"}
"""Operators of the functions that have another name."""
Call = Callable[[str], torch.Tensor]


class Path(NamedTuple):
    """What runs between a call and its launches: our functions, the most frames, and the files of these frames.

    ``kernels`` are the launches: sources of CUDA programs, names of Triton kernels.
    """

    functions: int
    frames: int
    files: tuple[str, ...]
    kernels: frozenset[str]


def calls() -> dict[str, Call]:
    """Return a call of each operator, given the name of a backend."""
    # Imported here: with Triton recorded, modules are imported anew.
    from rl_kernels.attention import det_attention
    from rl_kernels.det_gemm import det_linear
    from rl_kernels.fused_logp import fused_logp
    from rl_kernels.gated_delta import gated_delta_rule
    from rl_kernels.grpo_loss import grpo_loss
    from rl_kernels.linear_logp import linear_logp
    from rl_kernels.moe import experts, route
    from rl_kernels.norm import rms_norm

    def drawn(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)

    x, weight, scale, bias = drawn(64, 256), drawn(512, 256), drawn(256), drawn(512)
    logits, ids = drawn(64, 1024), torch.zeros(64, dtype=torch.int64)
    q, k, v = drawn(1, 64, 4, 64), drawn(1, 64, 2, 64), drawn(1, 64, 2, 64)
    logp, mask = torch.zeros(8, 16, requires_grad=True), torch.ones(8, 16, dtype=torch.bool)
    rewards = torch.arange(8.0)
    gate_up, down, routes = drawn(2, 256, 256), drawn(2, 256, 128), torch.arange(128).view(64, 2) % 2
    weights, router, rows, gates = drawn(64, 2), drawn(8, 256), drawn(1, 64, 2, 128), drawn(1, 64, 2)

    def loss(backend: str) -> torch.Tensor:
        old = logp.detach()
        return grpo_loss(logp, old, None, rewards, mask, samples_per_prompt=4, backend=backend).loss

    return {
        "rms_norm": lambda backend: rms_norm(x, scale, backend=backend),
        "fused_logp": lambda backend: fused_logp(logits, ids, backend=backend),
        "linear_logp": lambda backend: linear_logp(x, weight, ids, backend=backend),
        "det_linear": lambda backend: det_linear(x, weight, bias, backend=backend),
        "det_attention": lambda backend: det_attention(q, k, v, causal=True, backend=backend),
        "grpo_loss": loss,
        "experts": lambda backend: experts(x, gate_up, down, routes, weights, validate=False, backend=backend),
        "route": lambda backend: route(x, router, 2, backend=backend).weights,
        "gated_delta_rule": lambda backend: gated_delta_rule(rows, rows, rows, -gates, gates, backend=backend),
    }


class Counter:
    """Counts our functions while it is active, and frames at each launch, or at the first function of a file."""

    def __init__(self, file: str | None) -> None:
        self._file, self._functions, self._stack, self._kernels = file, 0, list[FrameType](), set[str]()

    def __enter__(self) -> Counter:
        """Count from here on."""
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        """Count no longer."""
        sys.setprofile(None)

    def path(self) -> Path:
        """Return what was counted."""
        files = [frame.f_code.co_filename.rpartition(OWN)[2] for frame in reversed(self._stack)]
        return Path(self._functions, len(files), tuple(dict.fromkeys(files)), frozenset(self._kernels))

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        self._functions += _is_own(frame)
        if frame.f_code.co_name == "launched":
            launch = frame.f_locals["launch"]
            self._kernels.add(launch.program.file if hasattr(launch, "program") else launch.name)
        if frame.f_code.co_name == "launched" or (frame.f_code.co_filename == self._file and not self._stack):
            own = [one for one in _stack(frame) if _is_own(one)]
            self._stack = max(self._stack, own, key=len)


def _is_own(frame: FrameType) -> bool:
    return OWN in frame.f_code.co_filename and TESTING not in frame.f_code.co_filename


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def recorded(operator: str, backend: str) -> Iterator[None]:
    """Record the launches of a backend, and let it take tensors on the CPU."""
    # A CUDA backend may launch kernels of the Triton backend too.
    with patch.object(Backend, "why_not", lambda *_: None), without_canaries(), TritonRecorder().pretended():
        kernel_registry.load(operator).backend(backend).load()
        # All memory is aligned alike then, so that a second call compiles nothing.
        importlib.import_module("rl_kernels.core.triton_lib.launch").ALIGNMENT = ALIGNED  # type: ignore[attr-defined]
        names = [name for name, module in sys.modules.items() if name.startswith("rl_kernels.") and _uses_gpu(module)]
        with Recorder().watching(*names):
            yield


def _uses_gpu(module: Any) -> bool:
    return any(hasattr(module, name) for name in GPU)


def counted(call: Call, backend: str, file: str | None) -> tuple[Path, Path]:
    """Return the paths of the forward and of the backward pass."""
    for _ in range(2):
        with Counter(file) as forward:
            out = call(backend)
        grad = torch.ones_like(out)
        with Counter(file) as backward:
            out.backward(grad)
    return forward.path(), backward.path()


def paths() -> Iterator[tuple[str, str, Path, Path]]:
    """Yield call, backend, and the paths of both passes."""
    for name, backends in BACKENDS.items():
        operator = kernel_registry.load(OPERATORS.get(name, name))
        for backend in backends:
            with recorded(operator.name, backend):
                file = operator.backend(backend).load().__file__ if backend == "native" else None
                yield name, backend, *counted(calls()[name], backend, file)


def keywords() -> Iterator[tuple[str, int, int, bool]]:
    """Yield each public function, its number of positional arguments and of keywords, and whether it takes others."""
    for operator in map(kernel_registry.load, kernel_registry.names()):
        for name in (operator.name, *operator.functions):
            parameters = signature(operator.function(name)).parameters.values()
            kinds = [one.kind for one in parameters]
            positional, named, others = map(
                kinds.count, (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
            )
            yield name, positional, named, bool(others)


HEAD = ("call", "backend", "pass", "functions", "frames", "files")


def main() -> int:
    """Print the tables."""
    parser = Parser("call_path.py", __doc__)
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args()
    table = [
        (name, backend, step, path.functions, path.frames, " > ".join(path.files))
        for name, backend, *both in paths()
        for step, path in zip(("forward", "backward"), both, strict=True)
    ]
    print(as_table([list(HEAD), *[[str(cell) for cell in row] for row in table]]))
    arguments = [[name, str(count), f"{named}{' and options' * more}"] for name, count, named, more in keywords()]
    print("", as_table([["function", "positional", "keywords"], *arguments]), sep="\n")
    if args.json:
        records = [dict(zip(HEAD, row, strict=True)) for row in table]
        write_json(args.json, {"version": 3, "records": records, "arguments": list(keywords())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
