"""The examples of the READMEs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


@pytest.mark.parametrize("readme", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_examples_run(readme: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shared: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(readme), "exec"), shared)
