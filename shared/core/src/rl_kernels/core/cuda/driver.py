"""Calls to the CUDA driver, checked."""

from __future__ import annotations

from typing import Any


class CudaError(RuntimeError):
    """The driver refused a call; the message holds what was called, and the driver's name and text of the error."""


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of ``cuda.bindings.driver`` returned, without its status.

    Raises:
        CudaError: the status is not success.
    """
    if result[0]:
        raise error_of(result[0], what)
    return result[1] if len(result) == 2 else result[1:]


def error_of(status: Any, what: str) -> CudaError:
    """Return the error for a status, with the driver's text."""
    from cuda.bindings import driver

    (_, name), (_, text) = driver.cuGetErrorName(status), driver.cuGetErrorString(status)
    name, text = (word.decode() if word else "unknown error" for word in (name, text))
    return CudaError(f"{what}: {name} ({text})")
