"""Load peers, compare them roughly with our result, and turn errors into one-line reasons for skipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_kernels.lab.bench.definition import Peer
from rl_kernels.lab.check.guard import Results

LOOSE = 5e-2
"""Largest relative norm of a peer's difference from our result; enough for a peer that rounds logits to BF16."""


class Skipped(Exception):
    """There is nothing to time; the message says why."""


def function_from(peer: Peer) -> Callable[..., Any]:
    """Return a peer's function; ``Skipped`` if something that it needs is missing."""
    assert peer.make is not None
    try:
        return peer.make()
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            raise Skipped(f"cannot be imported: {one_line(error)}") from error
        # The missing module may be the peer itself, or one of its dependencies.
        raise Skipped(f"{error.name} is not installed: pip install {peer.package}") from error
    except Exception as error:
        raise Skipped(one_line(error)) from error


@contextmanager
def skipped_on_error() -> Iterator[None]:
    """Turn whatever a peer raises, running out of memory included, into ``Skipped``."""
    try:
        yield
    except Skipped:
        raise
    except Exception as error:
        raise Skipped(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}".rstrip(": ")


def difference(theirs: Results, ours: Results) -> tuple[str, float]:
    """Return the name of the result in which a peer differs most from ours, and its relative difference."""
    shares = {name: _share(value, ours[name]) for name, value in theirs.items() if name in ours}
    name = max(shares, key=lambda key: shares[key])
    return name, shares[name]


def _share(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.numel() != expected.numel():
        raise Skipped(f"wrong: expected shape {tuple(expected.shape)}, got {tuple(value.shape)}")
    mine, theirs = (tensor.reshape(-1).float() for tensor in (expected, value))
    share = float((theirs - mine).norm() / mine.norm().clamp(min=1e-30))
    return share if share == share else float("inf")


@contextmanager
def tf32() -> Iterator[None]:
    """Run matrix products of FP32 in TF32, and restore the setting afterwards."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextmanager
def no_split_k() -> Iterator[None]:
    """Run matrix products by cuBLASLt without split-K reductions, and restore the settings afterwards.

    Raises:
        RuntimeError: this PyTorch has no such setting.
    """
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)) for name in names}
    if any(allowed is None for _, allowed in before.values()):
        raise RuntimeError(f"PyTorch {torch.__version__} cannot forbid split-K")
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        for name in names:
            setattr(matmul, name, (False, False))
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        for name, value in before.items():
            setattr(matmul, name, value)
