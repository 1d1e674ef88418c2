"""Give all packages one version: `python tools/bump.py 0.2.0`.

Rewrites every version and every exact pin between siblings, and makes the meta-package require every package there is.
CITATION.cff gets the version and today's date, and what CHANGELOG.md has under Unreleased gets a heading with both.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
META = ROOT / "packages" / "rl-kernels" / "pyproject.toml"
TEMPLATE = ROOT / "tools" / "operator_template" / "pyproject.toml"
CITATION = ROOT / "CITATION.cff"
CHANGELOG = ROOT / "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
PIN = re.compile(r'"(rl-kernels[\w-]*)==[^"]*"')


def project_files() -> list[Path]:
    """Return the pyproject.toml of every package, core first."""
    return [*sorted(ROOT.glob("shared/*/pyproject.toml")), *sorted(ROOT.glob("packages/*/pyproject.toml"))]


def bumped(text: str, version: str) -> str:
    """Return a pyproject.toml with its version and its pins of siblings replaced."""
    text = re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)
    return PIN.sub(rf'"\1=={version}"', text)


def requiring_all(text: str, names: list[str], version: str) -> str:
    """Return the meta-package's pyproject.toml with one pin for each of these packages."""
    unpinned = re.sub(rf"^    {PIN.pattern},\n", "", text, flags=re.MULTILINE)
    pins = "".join(f'    "{name}=={version}",\n' for name in names)
    return unpinned.replace("dependencies = [\n", "dependencies = [\n" + pins, 1)


def cited(text: str, version: str, day: str) -> str:
    """Return CITATION.cff with another version and date, which stand last."""
    head = re.sub(r"^(version|date-released): .*\n", "", text, flags=re.MULTILINE)
    return f'{head}version: {version}\ndate-released: "{day}"\n'


def released(text: str, version: str, day: str) -> str:
    """Return CHANGELOG.md with a heading for a version: a new one, or the one that it has with another date."""
    heading = f"## [{version}] - {day}\n"
    changed, count = re.subn(rf"^## \[{re.escape(version)}\] - .*\n", heading, text, count=1, flags=re.MULTILINE)
    return changed if count else text.replace(UNRELEASED, f"{UNRELEASED}\n{heading}", 1)


def main(version: str) -> None:
    """Rewrite the files in place."""
    day = datetime.date.today().isoformat()
    CITATION.write_text(cited(CITATION.read_text(encoding="utf-8"), version, day), encoding="utf-8")
    CHANGELOG.write_text(released(CHANGELOG.read_text(encoding="utf-8"), version, day), encoding="utf-8")
    files = project_files()
    for file in (*files, TEMPLATE):
        file.write_text(bumped(file.read_text(encoding="utf-8"), version), encoding="utf-8")
    names = sorted(f"rl-kernels-{file.parent.name}" for file in files if file != META)
    META.write_text(requiring_all(META.read_text(encoding="utf-8"), names, version), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not VERSION.fullmatch(sys.argv[1]):
        sys.exit(__doc__)
    main(sys.argv[1])
