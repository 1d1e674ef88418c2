"""Argument checks that operators share; every message names the argument, what was expected and what was given."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check

HALF_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*HALF_AND_FLOAT, torch.float64)
INTEGERS = (torch.int64, torch.int32)
RANGES = {dtype: (torch.finfo(dtype).tiny, torch.finfo(dtype).max) for dtype in (torch.float32, torch.float64)}
"""The smallest normal number (a device may flush smaller ones to 0), and the largest one."""
INT64, INT32 = (torch.iinfo(dtype).max for dtype in INTEGERS)
SHOWN_BITS = 128
IGNORED = -100
"""The id that PyTorch and trainers use for ignored positions."""


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype], ndim: int | None = None, least: int = 0) -> None:
    """Require a strided tensor of one of ``dtypes`` with exactly ``ndim``, or at least ``least``, dims."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}{_module_hint(name, value)}")
    if is_dtensor(value):
        raise TypeError(
            f"{name}: expected a local tensor{_for_operator()}, got a DTensor: pass its full_tensor(), which gathers "
            "it from all ranks, or its to_local() if you mean only this rank's part"
        )
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {_dtype_names(dtypes)}, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got layout {value.layout}")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dims, got shape {tuple(value.shape)}")
    if value.ndim < least:
        raise ValueError(f"{name}: expected at least {least} dims, got shape {tuple(value.shape)}")


def is_dtensor(value: object) -> bool:
    """Say whether a value is a DTensor, without an import of them; False under torch.compile."""
    return not torch.compiler.is_compiling() and type(value).__module__.startswith("torch.distributed.tensor")


def _module_hint(name: str, value: object) -> str:
    """Return a hint for a module: what to pass instead of it."""
    if not isinstance(value, torch.nn.Module):
        return ""
    if name == "lm_head_weight":
        return ": pass its .weight, or the module to head_logp of rl_kernels.models, which knows biases and adapters"
    if name == "bias" or name.endswith("weight"):
        return f": pass its .{name.rpartition('_')[2]}"
    return ": pass a tensor, such as its .weight or what it returns"


def _for_operator() -> str:
    """Name the operator whose public function is running. Called for error messages only, because it is slow."""
    frame = inspect.currentframe()
    while frame is not None:
        parts = str(frame.f_globals.get("__name__")).split(".")
        if parts[0] == "rl_kernels" and parts[-1] == "api" and not frame.f_code.co_name.startswith("_"):
            return f" for {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def shape(name: str, value: torch.Tensor, expected: Iterable[int], why: str) -> None:
    """Require a shape; ``why`` says where it comes from, as in "the leading dims of logits"."""
    expected_shape = tuple(expected)
    if tuple(value.shape) != expected_shape:
        raise ValueError(f"{name}: expected shape {expected_shape} ({why}), got {tuple(value.shape)}")


def same_device(**tensors: torch.Tensor | None) -> None:
    """Require all given tensors on the device of the first."""
    present = [(name, value) for name, value in tensors.items() if value is not None]
    first_name, first = present[0]
    for name, value in present[1:]:
        if value.device != first.device:
            raise ValueError(f"{name}: expected device {first.device} (that of {first_name}), got {value.device}")


def same_dtype(**tensors: torch.Tensor | None) -> None:
    """Require all given tensors in the dtype of the first."""
    present = [(name, value) for name, value in tensors.items() if value is not None]
    first_name, first = present[0]
    for name, value in present[1:]:
        if value.dtype != first.dtype:
            raise TypeError(f"{name}: expected dtype {first.dtype} (that of {first_name}), got {value.dtype}")


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Require a real number that is finite in ``dtype``, ``> above`` and ``>= least`` where given.

    With ``above=0``, numbers below the smallest normal number of ``dtype`` are refused too.
    """
    # Check for float first: checking against the abstract class takes ten times as long.
    real = isinstance(value, float) or (isinstance(value, numbers.Real) and not isinstance(value, (bool, torch.Tensor)))
    if not real:
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    tiny, most = RANGES[dtype]
    # Comparisons, unlike math.isfinite, can be traced with a number that varies from call to call.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if not -most <= value <= most:
        raise ValueError(
            f"{name}: expected a number within +-{most:.3g} ({_dtype_names((dtype,))}), got {_shortened(value)}"
        )
    if above is not None and not value > above:
        raise ValueError(f"{name}: expected a number > {above:g}, got {value}")
    if above == 0 and value < tiny:
        raise ValueError(f"{name}: expected a number > 0, at least {tiny:.3g} ({_dtype_names((dtype,))}), got {value}")
    if least is not None and not value >= least:
        raise ValueError(f"{name}: expected a number >= {least:g}, got {value}")


def integer(name: str, value: Any, least: int | None = None, most: int = INT64) -> None:
    """Require an integer of 64 bits, ``>= least`` where given, and ``<= most``."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    lowest = -INT64 if least is None else least
    if value < lowest:
        raise ValueError(f"{name}: expected an integer >= {lowest}, got {_shortened(value)}")
    if not value <= most:
        raise ValueError(f"{name}: expected an integer <= {most}, got {_shortened(value)}")


def _shortened(value: Any) -> str:
    """Return a number as text for a message; integers of more than 128 bits are shortened."""
    if isinstance(value, int) and value.bit_length() > SHOWN_BITS:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1} or more"
    return str(value)


def flag(name: str, value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Require one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def backend_name(value: object) -> None:
    """Require None or a string; the dispatcher checks that a backend has this name."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"backend: expected a name or None, got {type(value).__name__}")


def temperature(
    value: object, leading: Sequence[int], device: torch.device, dtype: torch.dtype, *, values: bool
) -> None:
    """Require a number > 0 in ``dtype``, or a floating tensor of such numbers on ``device``.

    The tensor has ``leading`` shape, or no dims. Its values are not checked if ``values`` is False, under torch.compile
    and while a CUDA graph is captured.
    """
    if not isinstance(value, torch.Tensor):
        number("temperature", value, above=0, dtype=dtype)
        return
    tensor("temperature", value, FLOATS)
    if value.ndim:
        shape("temperature", value, leading, "one value per token")
    if value.device != device:
        raise ValueError(f"temperature: expected device {device}, got {value.device}")
    if value.requires_grad:
        raise ValueError("temperature: expected a tensor that does not require grad: it gets no gradient")
    if values and not values_hidden(value):
        _check_positive(value.to(dtype), "temperature")


def ids_in_range(
    name: str, ids: torch.Tensor, size: int, ignore_index: int | None = None, *, ignorable: bool = True
) -> None:
    """Require every id in ``[0, size)`` or equal to ``ignore_index``. Costs a sync on a GPU.

    Skipped under torch.compile and while a CUDA graph is captured. ``ignorable=False`` if the function has no argument
    ``ignore_index``: the message then does not suggest it.
    """
    if not values_hidden(ids):
        _check_ids(ids, size, ignore_index, name, ignorable)


def _ids_in_range(ids: torch.Tensor, size: int, ignore_index: int | None, name: str, ignorable: bool) -> None:
    checked = ids if ignore_index is None else ids[ids != ignore_index]
    if not checked.numel():
        return
    low, high = _range(checked)
    if low < 0 or high >= size:
        ignored = "" if ignore_index is None else f" or {ignore_index} (ignored)"
        hint = ignorable and ignore_index is None and low == IGNORED
        advice = f"; ignore_index={IGNORED} ignores the positions with that id" if hint else ""
        raise ValueError(f"{name}: expected values in [0, {size}){ignored}, got values in [{low}, {high}]{advice}")


def _range(x: torch.Tensor) -> tuple[Any, Any]:
    low, high = torch.aminmax(x)
    if x.is_cpu:
        return low.item(), high.item()
    # One copy from a GPU, not two.
    low, high = torch.stack((low, high)).tolist()
    return low, high


def _require_positive(value: torch.Tensor, name: str) -> None:
    if not value.numel():
        return
    low, high = _range(value)
    if not low >= RANGES[value.dtype][0]:
        raise ValueError(f"{name}: expected values > 0, the smallest is {low}")
    if high == math.inf:
        raise ValueError(f"{name}: expected finite values, the largest is {high}")


_check_ids = define_check(
    "check_ids", "(Tensor ids, SymInt size, int? ignore_index, str name, bool ignorable)", _ids_in_range
)
_check_positive = define_check("check_positive", "(Tensor value, str name)", _require_positive)


def target_ids(name: str, value: object, leading: Sequence[int], why: str) -> None:
    """Require integer ids of ``leading`` shape; their range is checked by ``ids_in_range``."""
    tensor(name, value, INTEGERS)
    assert isinstance(value, torch.Tensor)
    shape(name, value, leading, why)


def ignore_index(value: object, ids: torch.Tensor) -> None:
    """Require None, or an integer in the range of the ids' dtype: outside, it would be compared as another number."""
    if value is not None:
        limits = torch.iinfo(ids.dtype)
        integer("ignore_index", value, least=limits.min, most=limits.max)


def main_grad(name: str, value: torch.Tensor, weight: torch.Tensor) -> None:
    """Require an FP32 gradient buffer of the weight's shape and device whose elements share no storage."""
    tensor(name, value, (torch.float32,))
    shape(name, value, weight.shape, "that of its weight")
    if value.device != weight.device:
        raise ValueError(f"{name}: expected device {weight.device} (that of its weight), got {value.device}")
    writable(name, value)


def writable(name: str, value: torch.Tensor) -> None:
    """Require ``own_storage``, and no tensor of inference mode outside of it: PyTorch does not write to one."""
    own_storage(name, value)
    if not torch.compiler.is_compiling() and value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: expected a tensor made outside of torch.inference_mode(), such as its clone()")


def own_storage(name: str, value: torch.Tensor) -> None:
    """Require a tensor that can be written to: no two elements share storage (no expanded or overlapping dims)."""
    if not value.numel():
        return
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride <= reach:
            raise ValueError(
                f"{name}: expected elements with storage of their own, got strides {value.stride()} "
                f"for shape {tuple(value.shape)}"
            )
        reach += stride * (size - 1)


def _dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
