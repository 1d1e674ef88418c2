"""The compiler's log, parsed: registers, shared memory and spills of each kernel, and warnings."""

from __future__ import annotations

import re
from dataclasses import dataclass

ENTRY = re.compile(r"Compiling entry function '([^']+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
WARNING = re.compile(r"\bwarning( #[\w-]+)? ?:", re.IGNORECASE)
SERIALIZED = "Potential Performance Loss"


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, including functions that it calls and that were not inlined.

    Attributes:
        entry: name of the kernel.
        registers: registers of a thread.
        shared: bytes of static shared memory of a block.
        spill_stores: bytes of register spills stored to memory.
        spill_loads: bytes of register spills loaded back.
        stack: bytes of a thread's stack frame.
    """

    entry: str
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int

    @property
    def spills(self) -> int:
        """Bytes of spilled registers, stores and loads together."""
        return self.spill_stores + self.spill_loads


def resources_of(log: str) -> list[Resources]:
    """Return the resources of each kernel, in the order of the log, which needs ``--ptxas-options=-v``."""
    parts = ENTRY.split(log)
    return [_resources(entry, text) for entry, text in zip(parts[1::2], parts[2::2], strict=True)]


def _resources(entry: str, text: str) -> Resources:
    frames = [tuple(map(int, match)) for match in STACK.findall(text)]
    stack, stores, loads = (sum(column) for column in zip(*frames, strict=True)) if frames else (0, 0, 0)
    registers, shared = (max(map(int, pattern.findall(text)), default=0) for pattern in (USED, SHARED))
    return Resources(entry, registers, shared, stores, loads, stack)


def warnings_of(log: str) -> list[str]:
    """Return the warnings in a log."""
    return [line.strip() for line in log.splitlines() if WARNING.search(line)]


def serialized_in(log: str) -> list[str]:
    """Return the lines of a log that say that products wait for each other."""
    return [line.strip() for line in log.splitlines() if SERIALIZED in line]
