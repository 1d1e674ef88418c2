"""What the tables of several tools share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOTHING = "\nNo results are committed yet.\n\n"


def filled(parts: Sequence[str]) -> str:
    """Return what stands between markers."""
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else NOTHING


def ran_on(where: Mapping[str, str]) -> str:
    """Return the line under a table that says what it was measured on."""
    named = ("device", "date", "torch", "transformers", "vllm", "trl", "batch_invariant_ops", "triton")
    return f"- ran on {', '.join(f'{name} {where[name]}' for name in named if name in where)}"


def of(some: int, every: int) -> str:
    """Return how many of all, and their share where there is one."""
    share = f"{some / every:.0%}" if 200 * some >= every else "under 1%"
    return f"{some:,} of {every:,}" + (f" ({share})" if some else "")


def picture(file: str, caption: str) -> str:
    """Return the comment that the site shows as a picture of a file of results."""
    return f"<!-- picture of {file}: {caption} -->"
