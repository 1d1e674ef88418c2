"""The GPUs that Triton's kernels are compiled for, and the shared memory that a program has there."""

from __future__ import annotations

from dataclasses import dataclass

NVIDIA, AMD = "cuda", "hip"
KIB = 1024
LEAST = 64 * KIB
"""Bytes of shared memory that a program has on every target."""


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        name: as ``rl-kernels compile`` takes it, such as ``sm_89``.
        platform: ``cuda`` or ``hip``, as Triton names it.
        shared: bytes of shared memory that a program may have.
        processors: multiprocessors of such a GPU.
    """

    name: str
    platform: str
    shared: int
    processors: int

    @property
    def arch(self) -> str:
        """Its name in the tolerance contract."""
        return self.name.replace("_", "")


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", NVIDIA, 163 * KIB, 108),
        Target("sm_86", NVIDIA, 99 * KIB, 84),
        Target("sm_89", NVIDIA, 99 * KIB, 128),
        Target("sm_90", NVIDIA, 227 * KIB, 132),
        Target("sm_100", NVIDIA, 227 * KIB, 148),
        Target("sm_120", NVIDIA, 99 * KIB, 170),
        Target("gfx942", AMD, LEAST, 304),
        Target("gfx950", AMD, 160 * KIB, 256),
    )
}
"""Targets by name. Shared memory: CUDA C++ Programming Guide, compute capabilities; AMD's CDNA 3 and 4 white papers."""
_SHARED = {target.arch: target.shared for target in TARGETS.values()}


def shared_memory_of(arch: str) -> int:
    """Return the bytes of shared memory of a program on an architecture; the least of all if it is not known."""
    return _SHARED.get(arch, LEAST)
