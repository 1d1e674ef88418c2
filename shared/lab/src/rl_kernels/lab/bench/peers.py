"""Peers at work: make them, hold them roughly to our result, or say in one line why there is nothing to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_kernels.lab.bench.definition import Peer
from rl_kernels.lab.check.guard import Results

LOOSE = 5e-2
"""Relative norm of the difference from our result that a peer may have: one that rounds logits to BF16 is inside."""


class Skipped(Exception):
    """There is nothing to time; the message says why."""


def made(peer: Peer) -> Callable[..., Any]:
    """Return a peer's function; ``Skipped`` if what it needs is not here."""
    assert peer.make is not None
    try:
        return peer.make()
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            raise Skipped(f"cannot be imported: {one_line(error)}") from error
        # The peer itself, or something that it needs.
        raise Skipped(f"{error.name} is not installed: pip install {peer.package}") from error
    except Exception as error:
        raise Skipped(one_line(error)) from error


@contextmanager
def named_if_it_fails() -> Iterator[None]:
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


def difference(found: Results, ours: Results) -> tuple[str, float]:
    """Return the result in which a peer is farthest from ours, and by what share of its norm."""
    shares = {name: _share(value, ours[name]) for name, value in found.items() if name in ours}
    name = max(shares, key=lambda key: shares[key])
    return name, shares[name]


def _share(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.numel() != expected.numel():
        raise Skipped(f"wrong: expected shape {tuple(expected.shape)}, got {tuple(value.shape)}")
    mine, theirs = (tensor.reshape(-1).float() for tensor in (expected, value))
    share = float((theirs - mine).norm() / mine.norm().clamp(min=1e-30))
    return share if share == share else float("inf")


@contextmanager
def no_split_k() -> Iterator[None]:
    """Have products taken by cuBLASLt without reductions of split-K, and restore what was set before.

    Raises:
        RuntimeError: this PyTorch cannot be told so.
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
