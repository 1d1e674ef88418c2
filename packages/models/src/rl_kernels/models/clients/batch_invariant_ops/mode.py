"""The batch-invariant mode: our operators replace kernels of PyTorch's ops, on CPUs and GPUs, until it ends.

The kernels are below autograd: gradients follow PyTorch's formulas, and their products run in the mode too. Integers,
whose sums are exact in any order, run PyTorch's kernel. So do the products inside our native backends, which would
otherwise call themselves.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from rl_kernels.core.torchlib.ops import within_native
from rl_kernels.models.clients.batch_invariant_ops import products, reductions

KEYS = ("CPU", "CUDA")
OVERRIDDEN_BEFORE = "(?s)Warning only once for all operators.*"
"""PyTorch's warning about the first overridden kernel; overriding is intended here."""

_lock = threading.RLock()
_library: torch.library.Library | None = None
_with_bmm = True


def is_batch_invariant_mode_enabled() -> bool:
    """Say whether the mode is on."""
    return _library is not None


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Turn the mode on for the process until it is turned off; if it is already on, nothing changes.

    No other thread may compute during the call: PyTorch exchanges kernels without waiting for running ones.

    Args:
        enable_bmm: replace ``bmm`` too; False keeps PyTorch's.
    """
    with _lock:
        if _library is None:
            _enter(enable_bmm)


def disable_batch_invariant_mode() -> None:
    """Turn the mode off, whoever turned it on, and restore PyTorch's kernels; does nothing if it is off."""
    with _lock:
        _leave()


@contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Turn the mode on or off for a ``with`` block and restore it after, also after an exception; blocks nest.

    The mode is per process: blocks that run in several threads at once must ask for the same mode.

    Args:
        enabled: True turns the mode on, ``bmm`` included; False turns it off.
    """
    with _lock:
        previous = (is_batch_invariant_mode_enabled(), _with_bmm)
        if enabled:
            enable_batch_invariant_mode()
        else:
            disable_batch_invariant_mode()
    try:
        yield
    finally:
        with _lock:
            current = (is_batch_invariant_mode_enabled(), _with_bmm)
            if current[0] and current != previous:
                _leave()
            if previous[0] and current != previous:
                _enter(previous[1])


def _enter(bmm: bool) -> None:
    global _library, _with_bmm
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", OVERRIDDEN_BEFORE)
            for name, function in OPS.items():
                if bmm or not name.startswith("bmm"):
                    for key in KEYS:
                        library.impl(
                            name, _kernel(function, _stock(name, key)), key, with_keyset=True, allow_override=True
                        )
    except BaseException:
        library._destroy()
        raise
    _library, _with_bmm = library, bmm


def _leave() -> None:
    global _library
    if _library is not None:
        _library._destroy()
    _library = None


def _stock(name: str, key: str) -> Any:
    """Return PyTorch's kernel of an op for a device; None without CUDA, and for ops without a CPU kernel."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _kernel(function: Callable[..., torch.Tensor | None], stock: Any) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not within_native():
            # Autograd has recorded the op already; it must not record our computation too.
            try:
                with torch.no_grad():
                    result = function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                # PyTorch's kernels raise it too; and ``a @ b`` would replace a TypeError by one without our message.
                raise RuntimeError(str(error)) from error
            if result is not None:
                return result
        if stock is None:
            raise NotImplementedError("input: expected a floating dtype, PyTorch has no integer kernel here")
        return stock.call_boxed(keyset, *args, **kwargs)

    return run


def _refuse_forward_ad() -> None:
    """Refuse forward-mode AD, which ``det_gemm`` does not have."""
    if forward_ad._current_level >= 0:
        raise RuntimeError("input: forward-mode AD is not supported in batch-invariant mode")


def _mm(self: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor | None:
    if products.is_exact(self, mat2):
        return None
    _refuse_forward_ad()
    return products.matrices("input", self, "mat2", mat2, out_dtype)


def _bmm(self: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor | None:
    if products.is_exact(self, mat2):
        return None
    _refuse_forward_ad()
    return products.batches("input", self, "mat2", mat2, out_dtype)


def _addmm(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: products.Number = 1,
    alpha: products.Number = 1,
) -> torch.Tensor | None:
    if products.is_exact(self, mat1, mat2):
        return None
    _refuse_forward_ad()
    return products.affine(self, mat1, mat2, beta=beta, alpha=alpha, out_dtype=out_dtype)


def _log_softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if half_to_float and self.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"input: expected dtype torch.float16 or torch.bfloat16 with half_to_float, got {self.dtype}")
    return reductions.log_probabilities(self, dim, torch.float32 if half_to_float else None)


def _mean(
    self: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return reductions.mean(self, dim, keepdim, dtype)


def _out_variant(function: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """Return the variant of an op that writes to ``out``."""

    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        result = function(*args, **kwargs)
        return None if result is None else _write("out", out, result)

    return run


def _addmm_in_place(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    result = _addmm(self, *args, **kwargs)
    return None if result is None else _write("input", self, result)


def _write(name: str, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if out.dtype != result.dtype:
        raise TypeError(f"{name}: expected dtype {result.dtype}, got {out.dtype}")
    if out.shape != result.shape and name == "out" and not out.numel():
        # The op resizes an empty out.
        out.resize_(result.shape)
    if out.shape != result.shape:
        raise ValueError(f"{name}: expected shape {tuple(result.shape)}, got {tuple(out.shape)}")
    return out.copy_(result)


OPS: dict[str, Callable[..., torch.Tensor | None]] = {
    "mm": _mm,
    "mm.out": _out_variant(_mm),
    "mm.dtype": _mm,
    "mm.dtype_out": _out_variant(_mm),
    "addmm": _addmm,
    "addmm.out": _out_variant(_addmm),
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _out_variant(_addmm),
    "addmm_": _addmm_in_place,
    "bmm": _bmm,
    "bmm.out": _out_variant(_bmm),
    "bmm.dtype": _bmm,
    "bmm.dtype_out": _out_variant(_bmm),
    "_log_softmax": _log_softmax,
    "_log_softmax.out": _out_variant(_log_softmax),
    "mean.dim": _mean,
    "mean.out": _out_variant(_mean),
}
"""Overload of an op of PyTorch -> our function, which returns None to call PyTorch's kernel."""
