"""Print the packages touched since a commit, by the names of their test sessions: `python tools/changed.py main`.

All packages depend on core, and all sessions on the settings at the root: a change there touches every package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"pyproject.toml", "noxfile.py", "constraints.txt"}


def changed_files(revision: str) -> list[str]:
    """List the files that differ from the revision, and those not yet under version control."""
    commands = (["diff", "--name-only", revision, "--"], ["ls-files", "--others", "--exclude-standard"])
    return [line for command in commands for line in git(*command).splitlines()]


def git(*arguments: str) -> str:
    """Run git at the root and return its output; exit with its status if it fails, after its own message."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def touched(files: list[str], packages: list[str]) -> list[str]:
    """Return the sessions of these files, in the order in which they run."""
    sessions = ["core", "lab", *packages, "integration"]
    if any(file in SETTINGS or file.startswith("shared/") for file in files):
        return sessions
    packages_touched = {file.split("/")[1] for file in files if file.startswith("packages/")}
    if packages_touched or any(file.startswith("tests_integration/") for file in files):
        packages_touched.add("integration")
    return [name for name in sessions if name in packages_touched]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    names = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))
    print(*touched(changed_files(sys.argv[1]), names), sep="\n")
