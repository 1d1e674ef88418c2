"""The code of the recipes runs as it stands; that of TRL's is run by ``test_trl_recipe.py``, beside TRL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

RECIPES = sorted((Path(__file__).parents[1] / "docs" / "recipes").glob("*.md"))
NEEDS = {"transformers": ("transformers",)}
"""What is to be installed for a page, beside the house."""
NOT_WHOLE = ("verl", "torchtitan", "openrlhf", "megatron")
"""Pages of frameworks that no test runs as a whole, which they say; test_verl.py runs what can be run of verl."""


@pytest.mark.parametrize(
    "page", [page for page in RECIPES if page.stem not in ("trl", *NOT_WHOLE)], ids=lambda page: page.stem
)
def test_code_runs(page: Path) -> None:
    for module in NEEDS.get(page.stem, ()):
        pytest.importorskip(module)
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    shared: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), shared)


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_what_was_not_run_is_said(name: str) -> None:
    page = next(page for page in RECIPES if page.stem == name).read_text(encoding="utf-8")
    assert re.search(r"not run by us as a whole|what was not run", page, re.IGNORECASE)
    assert "```python" not in page
