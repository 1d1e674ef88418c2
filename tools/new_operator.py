"""Make the package of a new operator: `python tools/new_operator.py scaled-add`.

It is a copy of tools/operator_template under the new name, and works at once: it installs, passes its tests and the
checker, and has a page in the docs. Replace the definition first, then the cases, then the backend.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "operator_template"
TEMPLATE_NAME, TEMPLATE_OPERATOR = "scaled-add", "scaled_add"


def spellings(name: str, operator: str) -> tuple[str, str, str, str, str]:
    """Return the spellings of the names: import, path, distribution, operator, and its class."""
    module = name.replace("-", "_")
    words = "".join(word.capitalize() for word in operator.split("_"))
    return f"rl_kernels.{module}", f"rl_kernels/{module}", name, operator, words


def make(name: str, operator: str, folder: Path) -> Path:
    """Write the package ``folder/name`` and return it; ``ValueError`` if a name is malformed or taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"NAME: expected lower-case words joined by hyphens, got {name!r}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", operator):
        raise ValueError(f"--operator: expected lower-case words joined by underscores, got {operator!r}")
    package = folder / name
    if package.exists() or name in ("core", "lab", "models", "demo", "rl-kernels"):
        raise ValueError(f"NAME: {name!r} is taken")
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        target = package / renamed(source.relative_to(TEMPLATE).as_posix(), name, operator)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(source.read_text(encoding="utf-8"), name, operator), encoding="utf-8")
    return package


def renamed(text: str, name: str, operator: str) -> str:
    """Replace the template's names, in each of their spellings."""
    for old, new in zip(spellings(TEMPLATE_NAME, TEMPLATE_OPERATOR), spellings(name, operator), strict=True):
        text = text.replace(old, new)
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Make the package of a new operator.")
    parser.add_argument("name", metavar="NAME", help="lower-case words joined by hyphens, such as scaled-add")
    parser.add_argument("--operator", help="name of the operator (default: NAME with underscores)")
    parser.add_argument("--into", type=Path, default=ROOT / "packages", help="folder for the package")
    args = parser.parse_args(argv)
    try:
        operator = args.name.replace("-", "_") if args.operator is None else args.operator
        package = make(args.name, operator, args.into)
    except ValueError as error:
        print(f"new_operator: {error}", file=sys.stderr)
        return 2
    print(f"made {package}; next: nox -s 'tests({args.name})', then write its reference.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
