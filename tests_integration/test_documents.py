"""The documents hold together: their Python runs as printed, their links lead somewhere, and they fit a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from documents import CODE, ROOT, anchors, blocks, documents, name_of, prose
from forked import copied

ELSEWHERE = {"docs/recipes/trl.md": "test_trl_recipe.py, beside TRL", "docs/checker.md": "test_docs_checker.py"}
"""Documents whose Python another test runs."""
NEEDS = {f"docs/recipes/{name}.md": "transformers" for name in ("transformers", "your-own-loop")}
"""What is to be installed for a document."""
NOT_WHOLE = ("verl", "torchtitan", "openrlhf", "megatron")
"""Recipes of frameworks that no test runs as a whole, which they say; test_verl.py runs what can be run of verl."""
SCREENS, COLUMNS, WIDTH = 100, 10, 96
"""Lines of a package's README, columns of a table, and characters of a line of code, at most."""
LANGUAGES = {"python", "bash", "text", "toml", "yaml"}
"""Of code blocks; a shell block of another name would be run by nobody."""


@pytest.mark.parametrize("file", [file for file in documents() if blocks(file, "python")], ids=name_of)
def test_python_runs_as_printed(file: Path, tmp_path: Path) -> None:
    if name_of(file) in ELSEWHERE:
        pytest.skip(f"run by {ELSEWHERE[name_of(file)]}")
    if name_of(file) in NEEDS:
        pytest.importorskip(NEEDS[name_of(file)])
    # A copy, since documents leave models invariant, and with them transformers' modules.
    done = copied(lambda: _run(file), tmp_path)
    assert not done.returncode, done.stderr


def _run(file: Path) -> int:
    shared: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(file, "python"):
        exec(compile(block, str(file), "exec"), shared)
    return 0


@pytest.mark.parametrize("file", documents(), ids=name_of)
def test_links_and_named_files_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(file)):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        found = (file.parent / path).resolve() if path else file
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(found), target
    # Links of another form would not be followed.
    assert not re.search(r"<img|<a |^\[[^\]]+\]: |\]\([^)\s]+ \"", prose(file), re.MULTILINE)
    for name in re.findall(r"`((?:[\w-]+/)+\w+\.py)`", prose(file)):
        assert list(ROOT.glob(f"**/{name}")) or name == "rl_kernels/__init__.py", name


@pytest.mark.parametrize("file", documents(), ids=name_of)
def test_tables_and_code_fit_a_page(file: Path) -> None:
    for rule in re.findall(r"^[ :|-]*-\|-[ :|-]*$|^[ :|-]*- \| -[ :|-]*$", prose(file), re.MULTILINE):
        assert rule.startswith("|"), rule
        assert rule.count("|") - 1 <= COLUMNS
    found = CODE.findall(file.read_text(encoding="utf-8"))
    assert {language for _, language, _ in found} <= LANGUAGES
    assert not [line for _, _, block in found for line in block.splitlines() if len(line) > WIDTH]


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "recipes").glob("*.md")), ids=name_of)
def test_a_recipe_has_code_that_runs_or_says_that_it_was_not_run(file: Path) -> None:
    said = re.search(r"not run by us as a whole|what was not run", file.read_text(encoding="utf-8"), re.IGNORECASE)
    assert bool(blocks(file, "python")) == (file.stem not in NOT_WHOLE)
    assert said or file.stem not in NOT_WHOLE


@pytest.mark.parametrize("file", sorted(ROOT.glob("packages/*/README.md")), ids=name_of)
def test_a_package_s_readme_is_two_screens_and_begins_with_the_install(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= SCREENS
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "Install"
