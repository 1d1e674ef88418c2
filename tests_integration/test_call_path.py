"""How much of ours runs between a call and its launches: `tools/call_path.py`."""

from __future__ import annotations

from forked import imported

call_path = imported("call_path")

MOST = 6
"""Frames between the caller, or autograd, and a launch."""


def test_few_frames_lie_between_a_call_and_its_launches() -> None:
    rows = call_path.rows()
    assert len(rows) == sum(map(len, call_path.BACKENDS.values()))
    for name, backend, *counts in rows:
        assert 0 < counts[1] <= MOST, (name, backend, "forward")
        assert 0 < counts[3] <= MOST, (name, backend, "backward")
