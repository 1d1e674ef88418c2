"""Give all packages the same metadata and license file: `python tools/metadata.py`.

The address of the repository and a contact are not settled. Once they are, set them here and run this; until then no
wheel names an address.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tools" / "operator_template"

REPOSITORY = ""
CONTACT = ""
KEYWORDS = ["deterministic", "kernels", "llm", "pytorch", "reinforcement-learning", "triton"]
CLASSIFIERS = [
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Programming Language :: Python :: 3",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
PLACE = re.compile(r'^(requires-python = "[^"]*"\n).*?(?=^dependencies = \[)', re.MULTILINE | re.DOTALL)


def folders() -> list[Path]:
    """Return the folder of every package, and of the template for new ones."""
    return [*sorted(file.parent for file in ROOT.glob("*/*/pyproject.toml") if file.parent != TEMPLATE), TEMPLATE]


def block() -> str:
    """Return the lines between ``requires-python`` and the dependencies in every pyproject.toml."""
    lines = [f"keywords = {json.dumps(KEYWORDS)}", "classifiers = ["]
    lines += [f'    "{name}",' for name in CLASSIFIERS] + ["]"]
    if REPOSITORY:
        lines.append(f'urls = {{ Repository = "{REPOSITORY}" }}')
    if CONTACT:
        lines.append(f'maintainers = [{{ email = "{CONTACT}" }}]')
    return "\n".join(lines) + "\n"


def described(text: str) -> str:
    """Return a pyproject.toml with its metadata replaced by these lines."""
    return PLACE.sub(lambda match: match[1] + block(), text, count=1)


def main() -> None:
    """Rewrite the files in place."""
    for folder in folders():
        file = folder / "pyproject.toml"
        file.write_text(described(file.read_text(encoding="utf-8")), encoding="utf-8")
        shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")


if __name__ == "__main__":
    main()
