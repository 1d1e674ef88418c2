"""The canary: at first use, compares the bits of a small fixed product with those recorded for the architecture.

The chain of sums should fix these bits (README). But a compiler or driver that adds in another order would change every
result silently. So the first eager call for a device, dtype and backend computes the product and compares a digest with
``canary.json``. Calls under torch.compile and during CUDA graph capture leave that to the next eager call. An
architecture without a record, such as a CPU, is not checked.

``RL_KERNELS_CANARY`` says what happens on a mismatch: ``raise`` (the default, also if empty), ``warn``, or ``off`` to
skip the check.
``tools/record_canary.py`` records the bits of a GPU on which they are known to be right.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from importlib.resources import files

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.contract import DTYPES
from rl_kernels.core.dispatch import EnvironmentMistake, choose
from rl_kernels.core.operator import INVARIANT, arch_of
from rl_kernels.core.torchlib import values_hidden
from rl_kernels.det_gemm.op import OPERATOR, describe, ops

VARIABLE = "RL_KERNELS_CANARY"
ACTIONS = ("raise", "warn", "off")
ROWS, COLUMNS, INNER = 136, 120, 216
"""Sizes of the product: no multiples of a tile, K no multiple of a step, but rows are multiples of 16 bytes."""
FEW = 8
"""Rows that are computed a second time alone: few rows take other kernels."""
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 20}
"""Bits of the operands' integers: all that the dtype holds exactly; for FP32, more than TF32 keeps."""


class CanaryMismatch(RuntimeError):
    """A product has other bits than those recorded for this architecture."""


def _action(value: str) -> str:
    if value and value not in ACTIONS:
        raise EnvironmentMistake(f"{VARIABLE}: expected one of {', '.join(map(repr, ACTIONS))}, got {value!r}")
    return value or ACTIONS[0]


_default = _action(os.environ.get(VARIABLE, ""))
_passed: set[tuple[torch.device, torch.dtype, str]] = set()


def guard(like: torch.Tensor, backend: str) -> None:
    """Check a backend on the device and in the dtype of a tensor, unless it has passed there already.

    Raises:
        CanaryMismatch: its bits differ from the record.
    """
    if torch.compiler.is_compiling() or (like.device, like.dtype, backend) in _passed:
        return
    # A fake tensor or another subclass computes nothing on the device.
    if values_hidden(like) or type(like) not in (torch.Tensor, torch.nn.Parameter):
        return
    _compare(like.device, like.dtype, backend, _default)


def verify(
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str | None = None,
    on_mismatch: str = "raise",
) -> bool:
    """Compute the product on a device now and compare its bits with the record.

    Args:
        device: by default the current GPU, or the CPU where there is none.
        dtype: FP32, BF16 or FP16.
        backend: name of a backend, or ``auto``; by default the one that a call would take.
        on_mismatch: ``raise``, ``warn``, or ``off`` to skip the check, now and in later calls.

    Returns:
        True if there is a record and the bits match it.

    Raises:
        CanaryMismatch: the bits differ, and ``on_mismatch`` is ``raise``.
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run the product.
    """
    check.choice("dtype", dtype, check.HALF_AND_FLOAT)
    check.choice("on_mismatch", on_mismatch, ACTIONS)
    check.backend_name(backend)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    a, b = operands(dtype, where)
    return _compare(where, dtype, choose(OPERATOR, describe(a, b), backend).name, on_mismatch)


def _compare(device: torch.device, dtype: torch.dtype, backend: str, action: str) -> bool:
    expected = recorded().get(arch_of(device.type, device.index), {}).get(name_of(dtype))
    promised = OPERATOR.backend(backend).promises.get(device.type, frozenset()) >= INVARIANT
    if action == "off" or expected is None or not promised:
        _passed.add((device, dtype, backend))
        return False
    found = digest(dtype, device, backend)
    if found == expected:
        _passed.add((device, dtype, backend))
        return True
    message = (
        f"canary: {backend} on {device} gives other bits than recorded for {name_of(dtype)} ({found[:12]}, expected "
        f"{expected[:12]}): a driver, compiler or library has changed the order of a sum ({versions()}). To test "
        f"if rows are batch-invariant, run `rl-kernels check --op det_gemm --relation invariance`; "
        f"{VARIABLE}=warn only warns"
    )
    if action == "raise":
        raise CanaryMismatch(message)
    _passed.add((device, dtype, backend))
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    return False


def operands(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``a[M, K]`` and ``b[K, N]``, b stored like a weight: integers times powers of two, of mixed sizes."""
    a, weight = (_integers(rows, salt, dtype).to(device) for rows, salt in ((ROWS, 1), (COLUMNS, 2)))
    return a, weight.t()


def _integers(rows: int, salt: int, dtype: torch.dtype) -> torch.Tensor:
    # Integer arithmetic only, so that no random generator matters.
    index = torch.arange(rows * INNER, dtype=torch.int64, device="cpu") + salt * 1_000_003
    mixed = (index * 2_654_435_761) & 0xFFFF_FFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & 0xFFFF_FFFF
    size = BITS[dtype]
    whole = (mixed & ((1 << size) - 1)) - (1 << (size - 1))
    exponent = -((mixed >> 22) & 7) - size + 1
    return torch.ldexp(whole.double(), exponent).to(dtype).view(rows, INNER)


def digest(dtype: torch.dtype, device: torch.device, backend: str) -> str:
    """Return the SHA-256 of the product's FP32 bits: all rows, then a few rows alone."""
    a, b = operands(dtype, device)
    with torch.no_grad():
        parts = [ops["forward"](rows, b, None, torch.float32, backend).cpu() for rows in (a, a[:FEW])]
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


@functools.cache
def recorded() -> Mapping[str, Mapping[str, str]]:
    """Return the recorded digests, by architecture and dtype."""
    return json.loads((files("rl_kernels.det_gemm") / "canary.json").read_text(encoding="utf-8"))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the record."""
    return next(name for name, other in DTYPES.items() if other == dtype)


def versions() -> str:
    """Return the versions that may affect the bits."""
    triton = sys.modules.get("triton")
    found = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return found if triton is None else f"{found}, triton {triton.__version__}"
