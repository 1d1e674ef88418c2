"""Global state around a call (threads, defaults, modes): a call must neither depend on it nor change it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_kernels.core.testing.state import poisoned_empty, set_to, torch_threads

SUBNORMAL = 1e-40
"""An FP32 number that is 0 where subnormal numbers are flushed."""
COMPILERS_OWN = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that PyTorch sets when its compiler is imported, as the first call in forward mode does."""


@dataclass(frozen=True)
class Surroundings:
    """The state of torch in which a call is made, and where its arguments come from; None leaves a setting unchanged.

    Attributes:
        threads: number of CPU threads.
        poisoned: whether fresh memory holds NaN.
        default_dtype: argument of ``torch.set_default_dtype``.
        default_device: argument of ``torch.set_default_device``.
        autocast: the dtype of ``torch.autocast``, on the device of the inputs.
        inference: whether inference mode is on.
        matmul_precision: argument of ``torch.set_float32_matmul_precision``.
        checkpointed: whether the call is recomputed in the backward pass.
        computed: whether arguments that require grad are computed from the leaves, not leaves themselves.
        recording: whether gradients are recorded.
        parameters: arguments that are parameters of a module.
        same: two arguments that both get the tensor of the first.
        forward_only: whether backward runs without these settings, as after a ``with`` block.
    """

    threads: int | None = None
    poisoned: bool = False
    default_dtype: torch.dtype | None = None
    default_device: str | None = None
    autocast: torch.dtype | None = None
    inference: bool = False
    matmul_precision: str | None = None
    checkpointed: bool = False
    computed: bool = False
    recording: bool = True
    parameters: tuple[str, ...] = ()
    same: tuple[str, str] | None = None
    forward_only: bool = False

    @contextmanager
    def entered(self, device_type: str) -> Iterator[None]:
        """Apply the settings inside the block, and restore the previous ones at its end."""
        with ExitStack() as stack:
            if self.threads is not None:
                stack.enter_context(torch_threads(self.threads))
            if self.poisoned:
                stack.enter_context(poisoned_empty())
            if self.default_dtype is not None:
                stack.enter_context(set_to(self.default_dtype, torch.get_default_dtype(), torch.set_default_dtype))
            if self.default_device is not None:
                stack.enter_context(torch.device(self.default_device))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(device_type, self.autocast))
            if self.matmul_precision is not None:
                before = torch.get_float32_matmul_precision()
                stack.enter_context(set_to(self.matmul_precision, before, torch.set_float32_matmul_precision))
            if not self.recording:
                stack.enter_context(torch.no_grad())
            if self.inference:
                stack.enter_context(torch.inference_mode())
            yield


def global_state() -> dict[str, Any]:
    """Return, by name, the state that a call must not change."""
    return {
        "number of threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "torch random generator": torch.get_rng_state().numpy().tobytes(),
        "Python random generator": random.getstate(),
        "NumPy random generator": _numpy_state(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "flushing of subnormal numbers": float(torch.tensor(SUBNORMAL, dtype=torch.float32, device="cpu") * 1) == 0,
        "environment": {name: value for name, value in os.environ.items() if name != COMPILERS_OWN},
        "working directory": os.getcwd(),
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
    }


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *counters = np.random.get_state(legacy=True)
    return name, np.asarray(keys).tobytes(), *counters


def changed(before: dict[str, Any]) -> list[str]:
    """Return the names of the state that differs from ``before``."""
    return [name for name, value in global_state().items() if value != before[name]]
