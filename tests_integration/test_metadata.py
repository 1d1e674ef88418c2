"""What an index shows of a package: the METADATA of the built wheels, and the tools that write it into the sources."""

from __future__ import annotations

import re
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from forked import imported

tool, bump = imported("metadata"), imported("bump")
ROOT = Path(__file__).parents[1]
PROJECTS = sorted(file.parent for place in ("shared", "packages") for file in ROOT.glob(f"{place}/*/pyproject.toml"))
LICENSE = (ROOT / "LICENSE").read_bytes()


def read(wheel: Path) -> tuple[Message, dict[str, bytes]]:
    """Return the METADATA of a wheel, and its license files."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        licenses = {each: packed.read(each) for each in packed.namelist() if "/licenses/" in each}
        return Parser().parsestr(packed.read(name).decode()), licenses


def test_every_package_has_what_the_tool_writes() -> None:
    assert {*PROJECTS} < {*tool.folders()}
    for folder in tool.folders():
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        assert tool.block() in text
        assert tool.described(text) == text
        assert (folder / "LICENSE").read_bytes() == LICENSE


def test_repository_and_contact_are_written_once_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (PROJECTS[0] / "pyproject.toml").read_text(encoding="utf-8")
    monkeypatch.setattr(tool, "REPOSITORY", "https://example.org/repository")
    monkeypatch.setattr(tool, "CONTACT", "someone@example.org")
    added = {*tool.described(before).splitlines()} - {*before.splitlines()}
    assert added == {
        'urls = { Repository = "https://example.org/repository" }',
        'maintainers = [{ email = "someone@example.org" }]',
    }


def found(pattern: str, text: str) -> list[str]:
    return re.findall(pattern, text, re.MULTILINE)


def test_versions_and_dates_agree() -> None:
    project, citation, changelog = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("shared/core/pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    )
    (version,) = found(r'^version = "(.*)"$', project)
    assert found(r"^version: (.*)$", citation) == [version]
    unreleased, *releases = found(r"^## (.*)$", changelog)
    assert unreleased == "[Unreleased]"
    # Before the first release there is none, and no date.
    newest = [f"[{version}] - {day}" for day in found(r'^date-released: "(.*)"$', citation)]
    assert releases[:1] == newest


def test_releases_page_tells_the_versions_that_are_declared_and_run() -> None:
    page, project, pins, sessions = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/releases.md", "shared/core/pyproject.toml", "constraints.txt", "noxfile.py")
    )
    rows = {
        name: cells for name, *cells in (line.strip("| ").split(" | ") for line in page.splitlines() if "|" in line)
    }
    declared = {
        "Python": found(r'^requires-python = "(.*)"', project),
        "PyTorch": found(r'"torch(>=[\d.]+)', project),
        "Triton (extra `triton`, Linux)": found(r'"triton(>=[\d.]+)', project),
        "cuda-bindings (extra `cuda`)": found(r'"cuda-bindings(>=[\d.]+)', project),
    }
    assert {name: [rows[name][0].replace(" ", "")] for name in declared} == declared
    run = {
        "PyTorch": found(r"^torch==(.*)$", pins) + found(r'^FLOOR = \("torch==([\d.]+)', sessions),
        "Triton (extra `triton`, Linux)": found(r'"triton==([\d.]+)"', sessions),
        "cuda-bindings (extra `cuda`)": found(r"^cuda-bindings==(.*)$", pins),
        "transformers": found(r"^transformers==(.*)$", pins)
        + found(r'^TRANSFORMERS = \("transformers==([\d.]+)', sessions),
        "TRL": found(r"^trl==(.*)$", pins),
        "verl": found(r'"verl==([\d.]+)"', sessions),
    }
    assert not [(name, version) for name in run for version in run[name] or [None] if str(version) not in rows[name][1]]


def test_bump_writes_pins_citation_and_changelog() -> None:
    project = 'version = "0.1.0"\ndependencies = [\n    "rl-kernels-core==0.1.0",\n    "torch>=2.11",\n]\n'
    assert bump.bumped(project, "0.2.0") == project.replace("0.1.0", "0.2.0")
    added = project.replace("0.1.0", "0.2.0").replace('    "torch', '    "rl-kernels-norm==0.2.0",\n    "torch')
    assert bump.requiring_all(bump.bumped(project, "0.2.0"), ["rl-kernels-core", "rl-kernels-norm"], "0.2.0") == added

    citation = "title: rl-kernels\nversion: 0.1.0\n"
    once = bump.cited(citation, "0.2.0", "2030-01-02")
    assert once == 'title: rl-kernels\nversion: 0.2.0\ndate-released: "2030-01-02"\n'
    assert bump.cited(once, "0.2.0", "2030-01-02") == once

    changelog = "# Changelog\n\n## [Unreleased]\n\n### Fixed\n"
    first = bump.released(changelog, "0.2.0", "2030-01-02")
    assert first == "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2030-01-02\n\n### Fixed\n"
    assert bump.released(first, "0.2.0", "2030-01-03") == first.replace("01-02", "01-03")


@pytest.mark.slow
@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_wheel_tells_license_and_kind(folder: Path, wheels: Path) -> None:
    name = folder.name if folder.name == "rl-kernels" else f"rl-kernels-{folder.name}"
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    told, licenses = read(wheel)
    assert told["License-Expression"] == "Apache-2.0"
    assert told.get_all("License-File") == ["LICENSE"]
    assert list(licenses.values()) == [LICENSE]
    assert told.get_all("Classifier") == tool.CLASSIFIERS
    assert sorted(told["Keywords"].split(",")) == sorted(tool.KEYWORDS)
    assert (told.get_all("Project-URL") or []) == [f"Repository, {tool.REPOSITORY}"][: bool(tool.REPOSITORY)]
