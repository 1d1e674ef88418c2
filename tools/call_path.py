"""Count what runs on the host from a call to its launches, on any machine: `python tools/call_path.py`.

Kernels are recorded instead of launched (``core.testing``), so no GPU and no Triton is needed. For each operator and
backend the table has, of the second call of a kind: our functions that run, and the most frames of ours between the
caller, or autograd, and a launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from rl_kernels.core.command import Parser, writable, write_json
from rl_kernels.core.dispatch import without_canaries
from rl_kernels.core.operator import Backend
from rl_kernels.core.registry import kernel_registry
from rl_kernels.core.testing.launches import Recorder
from rl_kernels.core.testing.triton_launches import TritonRecorder
from rl_kernels.lab.bench.report import as_table

OWN, TESTING = "rl_kernels/", "core/testing/"
GPU = ("kernel", "tensor_map", "processors")
"""What modules import to use a GPU; ``Recorder`` replaces it."""
BOTH = ("cuda-sm90", "triton")
BACKENDS = {
    "rms_norm": ("triton",),
    "fused_logp": ("cuda-generic", "triton"),
    "linear_logp": BOTH,
    "det_linear": BOTH,
    "det_attention": BOTH,
    "grpo_loss": ("triton",),
    "experts": ("triton",),
}
Call = Callable[[str], torch.Tensor]


def calls() -> dict[str, Call]:
    """Return a call of each operator, given the name of a backend."""
    # Imported here: with Triton recorded, modules are imported anew.
    from rl_kernels.attention import det_attention
    from rl_kernels.det_gemm import det_linear
    from rl_kernels.fused_logp import fused_logp
    from rl_kernels.grpo_loss import grpo_loss
    from rl_kernels.linear_logp import linear_logp
    from rl_kernels.moe import experts
    from rl_kernels.norm import rms_norm

    def drawn(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)

    x, weight, scale, bias = drawn(64, 256), drawn(512, 256), drawn(256), drawn(512)
    weights = drawn(64, 2)
    logits, ids = drawn(64, 1024), torch.zeros(64, dtype=torch.int64)
    q, k, v = drawn(1, 64, 4, 64), drawn(1, 64, 2, 64), drawn(1, 64, 2, 64)
    logp, mask = torch.zeros(8, 16, requires_grad=True), torch.ones(8, 16, dtype=torch.bool)
    rewards = torch.arange(8.0)
    gate_up, down, routes = drawn(8, 256, 256), drawn(8, 256, 128), torch.arange(128).view(64, 2) % 8

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
    }


class Counter:
    """Counts our functions while it is active, and frames at each launch."""

    def __init__(self) -> None:
        self.functions = self.frames = 0

    def __enter__(self) -> Counter:
        """Count from here on."""
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        """Count no longer."""
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if _is_own(frame):
            self.functions += 1
        elif frame.f_code.co_name == "launched":
            self.frames = max(self.frames, sum(map(_is_own, _stack(frame))))


def _is_own(frame: FrameType) -> bool:
    return OWN in frame.f_code.co_filename and TESTING not in frame.f_code.co_filename


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def recorded(operator: str, backend: str) -> Iterator[None]:
    """Record the launches of a backend, and let it take tensors on the CPU."""
    with patch.object(Backend, "why_not", lambda *_: None), without_canaries():
        if backend == "triton":
            with TritonRecorder().pretended():
                yield
            return
        kernel_registry.load(operator).backend(backend).load()
        names = [name for name, module in sys.modules.items() if name.startswith("rl_kernels.") and _uses_gpu(module)]
        with Recorder().watching(*names):
            yield


def _uses_gpu(module: Any) -> bool:
    return any(hasattr(module, name) for name in GPU)


def counted(call: Call, backend: str) -> list[int]:
    """Return functions and frames of the forward pass, then of the backward pass."""
    for _ in range(2):
        with Counter() as forward:
            out = call(backend)
        grad = torch.ones_like(out)
        with Counter() as backward:
            out.backward(grad)
    return [forward.functions, forward.frames, backward.functions, backward.frames]


HEAD = ("call", "backend", "forward: functions", "forward: frames", "backward: functions", "backward: frames")


def rows() -> list[list[Any]]:
    """Return the rows of the table."""
    found: list[list[Any]] = []
    for name, backends in BACKENDS.items():
        for backend in backends:
            with recorded("det_gemm" if name == "det_linear" else name, backend):
                found.append([name, backend, *counted(calls()[name], backend)])
    return found


def main() -> int:
    """Print the table."""
    parser = Parser("call_path.py", __doc__)
    parser.add_argument("--json", type=writable, help="file for the results")
    args = parser.parse_args()
    table = rows()
    print(as_table([list(HEAD), *[[str(cell) for cell in row] for row in table]]))
    if args.json:
        write_json(args.json, {"version": 1, "records": [dict(zip(HEAD, row, strict=True)) for row in table]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
