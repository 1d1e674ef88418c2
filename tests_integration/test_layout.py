"""The tree keeps its form: the same rooms in every package, one version, one namespace, nothing of a machine."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked import imported

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SHARED = [file.parent for file in sorted(ROOT.glob("shared/*/pyproject.toml"))]
PROJECTS = [*SHARED, *(file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml")))]
META = "rl-kernels"
OPERATORS = [folder for folder in PROJECTS[len(SHARED) :] if folder.name not in (META, "models")]
MODULES = (
    *("__init__.py", "api.py", "op.py", "reference.py", "backends/__init__.py"),
    *(f"spec/{name}.py" for name in ("cases", "illegal", "bench")),
)
ROOMS = [
    "README.md",
    "GUIDE.md",
    "benchmarks/README.md",
    "tests",
    *(f"src/rl_kernels/{{name}}/{file}" for file in MODULES),
]


def named(folder: Path) -> str:
    return folder.name


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_packages_are_found_and_nothing_closes_the_namespace() -> None:
    assert len(OPERATORS) >= 4
    assert not [*ROOT.glob("shared/*/src/rl_kernels/__init__.py"), *ROOT.glob("packages/*/src/rl_kernels/__init__.py")]


@pytest.mark.parametrize("folder", OPERATORS, ids=named)
def test_operator_has_the_same_rooms(folder: Path) -> None:
    rooms = [room.format(name=folder.name.replace("-", "_")) for room in ROOMS]
    assert [room for room in rooms if not (folder / room).exists()] == []


@pytest.mark.parametrize("folder", OPERATORS, ids=named)
def test_guide_leads_to_every_kernel(folder: Path) -> None:
    table = (folder / "GUIDE.md").read_text(encoding="utf-8").partition("## Where the code is")[2].partition("\n## ")[0]
    told = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.(?:py|cu))`", table)}
    backends = [*folder.glob("src/rl_kernels/*/backends/**/*.py"), *folder.glob("src/rl_kernels/*/backends/**/*.cu")]
    leading = {path.name for path in backends if path.suffix == ".cu" or path.stem in ("backend", "kernels", "native")}
    assert leading <= told
    assert told <= {path.name for path in ROOT.glob("*/*/src/rl_kernels/**/*")}


ORDERS_PRODUCTS = ("attention", "gated-delta")
"""Operators whose products need each other's results: their kernels wait for them and release stages themselves."""


@pytest.mark.parametrize("folder", OPERATORS, ids=named)
def test_kernels_have_no_ptx_and_no_mainloop_of_their_own(folder: Path) -> None:
    # An empty asm only keeps the compiler from knowing a value.
    own = r'asm(?: volatile)?\(\s*"[^"]|\b(?:Products<|(?:fence|commit)_products\b)'
    if folder.name not in ORDERS_PRODUCTS:
        own += r"|\b(?:products_done|give_back)\b"
    kernels = [*folder.glob("src/rl_kernels/**/*.cu"), *folder.glob("src/rl_kernels/**/*.cuh")]
    assert not [file for file in kernels if re.search(own, file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("folder", PROJECTS, ids=named)
def test_packages_are_declared_alike(folder: Path) -> None:
    """Typed, with the namespace in the wheel, the name of the folder, one version, and exact pins of each other."""
    (package,) = (path for path in folder.glob("src/rl_kernels/*") if path.name != "__pycache__")
    assert (package / "py.typed").exists()
    expected: dict[str, Any] = {"packages": ["src/rl_kernels"]}
    if list(folder.glob("src/rl_kernels/**/*.cu")):
        expected["artifacts"] = ["**/cubins/*.cubin"]
    assert project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"] == expected
    declared = project(folder)["project"]
    assert declared["name"] == (META if folder.name == META else f"rl-kernels-{folder.name}")
    version = project(PROJECTS[0])["project"]["version"]
    siblings = {f"{project(other)['project']['name']}=={version}" for other in PROJECTS}
    assert declared["version"] == version
    assert {word for word in declared["dependencies"] if word.startswith("rl-kernels")} <= siblings


@pytest.mark.parametrize("folder", OPERATORS, ids=named)
def test_operator_depends_on_core_alone_and_extras_bring_what_its_backends_need(folder: Path) -> None:
    declared, sources = project(folder)["project"], folder / "src" / "rl_kernels"
    assert sorted(re.split(r"[=<>]", word)[0] for word in declared["dependencies"]) == ["rl-kernels-core", "torch"]
    needed = {name for name in ("cuda", "triton") if [*sources.rglob(f"backends/{name}*")]}
    assert set(declared["optional-dependencies"]) == needed


@pytest.mark.parametrize("folder", OPERATORS, ids=named)
def test_operator_announces_itself(folder: Path) -> None:
    announced = project(folder)["project"]["entry-points"]["rl_kernels.operators"]
    package = f"rl_kernels.{folder.name.replace('-', '_')}"
    assert announced
    for name, target in announced.items():
        module, _, attribute = target.partition(":")
        operator = getattr(importlib.import_module(module), attribute)
        assert (operator.name, operator.package) == (name, package)
        assert operator.distribution == project(folder)["project"]["name"]


@pytest.mark.parametrize("folder", PROJECTS, ids=named)
def test_entry_points_lead_somewhere(folder: Path) -> None:
    declared = project(folder)["project"]
    groups = [declared.get("scripts", {}), *declared.get("entry-points", {}).values()]
    for target in (target for group in groups for target in group.values()):
        module, _, attribute = target.partition(":")
        place = folder / "src" / Path(*module.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert file.exists(), target
        assert re.search(rf"^(def )?{attribute}\b", file.read_text(encoding="utf-8"), re.MULTILINE), target


def test_core_knows_what_is_published() -> None:
    tool = imported("published")
    assert json.loads(tool.FILE.read_text(encoding="utf-8")) == tool.published()


def test_nothing_of_a_machine_is_tracked() -> None:
    private = r"(?<![\w.:/>-])/(work|root|home|farm|tmp|Users)/"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert not [file for file in files if re.search(private, file.read_text(encoding="utf-8", errors="replace"))]
