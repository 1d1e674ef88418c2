"""The code of the recipes runs as it stands; that of TRL's is run by ``test_trl_recipe.py``, beside TRL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

RECIPES = sorted((Path(__file__).parents[1] / "docs" / "recipes").glob("*.md"))
NEEDS = {"transformers": ("transformers",)}
"""What is to be installed for a page, beside the house."""


@pytest.mark.parametrize("page", [page for page in RECIPES if page.stem != "trl"], ids=lambda page: page.stem)
def test_code_runs(page: Path) -> None:
    for module in NEEDS.get(page.stem, ()):
        pytest.importorskip(module)
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    shared: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), shared)
