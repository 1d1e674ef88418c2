"""Helpers of the tables of several tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NO_RESULTS = "\nNo results are committed yet.\n\n"


def filled(parts: Sequence[str]) -> str:
    """Return the text between two markers of a page."""
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else NO_RESULTS


def ran_on(machine: Mapping[str, str]) -> str:
    """Return the line under a table with the machine and the versions that it was measured on."""
    named = ("device", "date", "torch", "transformers", "vllm", "trl", "batch_invariant_ops", "fla-core", "triton")
    return f"- ran on {', '.join(f'{name} {machine[name]}' for name in named if name in machine)}"


def of(some: int, every: int) -> str:
    """Return the text "N of M", with their share unless it is 0."""
    share = f"{some / every:.0%}" if 200 * some >= every else "under 1%"
    return f"{some:,} of {every:,}" + (f" ({share})" if some else "")


def extent(moves: Mapping[str, float]) -> str:
    """Return the mean and the largest of differences of log-probabilities, or 0."""
    return f"{moves['mean']:.1e}, {moves['largest']:.1e}" if moves["largest"] else "0"


def picture(file: str, caption: str) -> str:
    """Return the comment that the site shows as a picture of a file of results."""
    return f"<!-- picture of {file}: {caption} -->"
