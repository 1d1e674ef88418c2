"""The recipe of TRL: its script trains, and what it says of bits holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
# TRL and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "trl.md"
DIFFERENCE = "sampling/sampling_logp_difference/max"


def trained(changed: tuple[str, str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, list[float]]:
    """Run the script of the page, with one text in place of another, in a folder; return what it logged."""
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert script.count(changed[0]) == 1
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(compile(script.replace(*changed), str(PAGE), "exec"), found)
    history = found["trainer"].state.log_history
    return {name: [each[name] for each in history if name in each] for name in ("reward", DIFFERENCE)}


def test_the_reward_rises_and_no_bit_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = trained(("invariant=True", "invariant=True"), monkeypatch, tmp_path)
    assert found[DIFFERENCE] == [0.0] * 20
    assert sum(found["reward"][-5:]) / 5 > sum(found["reward"][:5]) / 5 + 0.3


def test_without_invariance_bits_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = trained(("invariant=True", "record=True"), monkeypatch, tmp_path)
    assert 0 < max(found[DIFFERENCE]) < 1e-5
