"""What tests of the documents share: the files, their code blocks, the commands in them, their links and tables."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
APART = ("tools/", ".github/")
"""Where Markdown files lie that are templates."""
SHELL = ("bash", "sh")
CODE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Return every Markdown file that a reader is to see."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if not name.startswith(APART)]


def name_of(file: Path) -> str:
    """Return a document's path in the repository, for the names of tests."""
    return file.relative_to(ROOT).as_posix()


def blocks(file: Path, *languages: str) -> list[str]:
    """Return the code blocks of a document in these languages."""
    found = CODE.findall(file.read_text(encoding="utf-8"))
    return [code for _, language, code in found if language in languages]


def prose(file: Path) -> str:
    """Return a document without its code blocks."""
    return CODE.sub("", file.read_text(encoding="utf-8"))


def commands(file: Path) -> list[str]:
    """Return the commands of a document's shell blocks, without comments, each by itself, continued lines as one."""
    lines = [line for block in blocks(file, *SHELL) for line in block.replace("\\\n", " ").splitlines()]
    found = [" ".join(words) for line in lines if (words := _words(line))]
    return [part.strip() for line in found for part in re.split(r" && | ; | \| ", line)]


def inline(file: Path) -> list[str]:
    """Return the commands in a document's text: code between backticks that begins as one, without ``...``."""
    found = re.findall(r"`([^`]+)`", prose(file))
    begins = re.compile(r"(rl-kernels|(python -m )?nox -s|python tools/|pip install) ?\S")
    return [" ".join(code.split()) for code in found if begins.match(code) and "..." not in code]


def _words(line: str) -> list[str]:
    """Return a line with its comment left out, its words as the shell quotes them."""
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    return list(lexer)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(file: Path) -> set[str]:
    """Return the anchors of a document."""
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE)}
