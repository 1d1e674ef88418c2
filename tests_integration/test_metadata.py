"""What an index shows of a package: the METADATA of the built wheels, and the tool that writes it into the sources."""

from __future__ import annotations

import importlib.util
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = sorted(file.parent for place in ("shared", "packages") for file in ROOT.glob(f"{place}/*/pyproject.toml"))
LICENSE = (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metadata", ROOT / "tools" / "metadata.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def read(wheel: Path) -> tuple[Message, dict[str, bytes]]:
    """Return the METADATA of a wheel, and its licence files."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        licences = {each: packed.read(each) for each in packed.namelist() if "/licenses/" in each}
        return Parser().parsestr(packed.read(name).decode()), licences


def test_every_package_has_what_the_tool_writes(tool: ModuleType) -> None:
    assert {*PROJECTS} < {*tool.folders()}
    for folder in tool.folders():
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        assert tool.block() in text
        assert tool.described(text) == text
        assert (folder / "LICENSE").read_bytes() == LICENSE


def test_repository_and_contact_are_written_once_set(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (PROJECTS[0] / "pyproject.toml").read_text(encoding="utf-8")
    monkeypatch.setattr(tool, "REPOSITORY", "https://example.org/repository")
    monkeypatch.setattr(tool, "CONTACT", "someone@example.org")
    added = {*tool.described(before).splitlines()} - {*before.splitlines()}
    assert added == {
        'urls = { Repository = "https://example.org/repository" }',
        'maintainers = [{ email = "someone@example.org" }]',
    }


@pytest.mark.slow
@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_wheel_tells_licence_and_kind(folder: Path, wheels: Path, tool: ModuleType) -> None:
    name = folder.name if folder.name == "rl-kernels" else f"rl-kernels-{folder.name}"
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    told, licences = read(wheel)
    assert told["License-Expression"] == "Apache-2.0"
    assert told.get_all("License-File") == ["LICENSE"]
    assert list(licences.values()) == [LICENSE]
    assert told.get_all("Classifier") == tool.CLASSIFIERS
    assert sorted(told["Keywords"].split(",")) == sorted(tool.KEYWORDS)
    assert (told.get_all("Project-URL") or []) == [f"Repository, {tool.REPOSITORY}"][: bool(tool.REPOSITORY)]
