"""Make the package of a new operator: `python tools/new_operator.py scaled-add`.

It is a copy of tools/operator_template under the new name, and works as it stands: it installs, passes its tests and
the checker, and has a page in the docs. Replace the definition first, then the cases, then the backend.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "operator_template"
TEMPLATE_NAME = "scaled-add"


def spellings(name: str) -> tuple[str, str, str]:
    """Return how a name is written: as a distribution, as a module, as a class."""
    return name, name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))


def make(name: str, folder: Path) -> Path:
    """Write the package ``folder/name`` and return it; ``ValueError`` if the name is no name or is taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"NAME: expected lower-case words joined by hyphens, got {name!r}")
    made = folder / name
    if made.exists() or name in ("core", "lab", "models", "demo", "rl-kernels"):
        raise ValueError(f"NAME: {name!r} is taken")
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        target = made / renamed(str(source.relative_to(TEMPLATE)), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(source.read_text(encoding="utf-8"), name), encoding="utf-8")
    return made


def renamed(text: str, name: str) -> str:
    """Replace the template's name, in each of its spellings."""
    for old, new in zip(spellings(TEMPLATE_NAME), spellings(name), strict=True):
        text = text.replace(old, new)
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Make the package of a new operator.")
    parser.add_argument("name", metavar="NAME", help="lower-case words joined by hyphens, such as scaled-add")
    parser.add_argument("--into", type=Path, default=ROOT / "packages", help="folder for the package")
    given = parser.parse_args(argv)
    try:
        made = make(given.name, given.into)
    except ValueError as error:
        print(f"new_operator: {error}", file=sys.stderr)
        return 2
    print(f"made {made}; next: nox -s 'tests({given.name})', then write its reference.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
