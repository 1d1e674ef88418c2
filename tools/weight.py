"""Count tracked lines: `python tools/weight.py`, or `--at COMMIT`: lines by kind, Python by room, largest modules."""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 10
PROOF = ("tests", "spec", "core testing")


def tracked(commit: str) -> Iterator[tuple[PurePosixPath, int]]:
    """Yield each tracked file of text with its number of lines, as it is at a commit or, without one, in the tree."""
    if not commit:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        files = ((name, ROOT / name) for name in listed.stdout.split("\0") if name)
        yield from ((PurePosixPath(name), file.read_bytes().count(b"\n")) for name, file in files if file.is_file())
        return
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                yield PurePosixPath(member.name), content.read().count(b"\n")


def room(path: PurePosixPath) -> str:
    """Return the room of a Python file."""
    parts = path.parts
    if parts[0] == "tests_integration" or "tests" in parts or path.name == "conftest.py":
        return "tests"
    if {"spec", "mutants"} & {*parts}:
        # The shapes and peers of `rl-kernels bench` prove nothing.
        return "bench" if path.name == "bench.py" else "spec"
    if parts[0] not in ("shared", "packages"):
        return "tools"
    for name, folder in (("core testing", "core/testing"), ("lab", "rl_kernels/lab"), ("demo", "rl_kernels/demo")):
        if f"/{folder}/" in str(path):
            return name
    return f"run time: {parts[1]}"


def table(title: str, counts: dict[str, tuple[int, int]]) -> str:
    """Return rows of files and lines, the largest first, and their sum."""
    rows = sorted(counts.items(), key=lambda row: -row[1][1])
    rows.append(("all", tuple(map(sum, zip(*counts.values(), strict=True)))))
    width = max(len(name) for name, _ in rows)
    lines = (f"{name:{width}}  {files:5,} files {lines:8,} lines" for name, (files, lines) in rows)
    return "\n".join((title, *lines, ""))


def counted(names: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return files and lines by name."""
    files, lines = Counter[str](), Counter[str]()
    for name, count in names:
        files[name] += 1
        lines[name] += count
    return {name: (files[name], lines[name]) for name in files}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", default="", metavar="COMMIT", help="count a commit (default: the tree as it is)")
    lines_by_path = dict(tracked(parser.parse_args().at))
    python = {path: count for path, count in lines_by_path.items() if path.suffix == ".py"}
    rooms = counted([(room(path), count) for path, count in python.items()])
    print(
        table("Tracked, by kind", counted([(path.suffix or path.name, count) for path, count in lines_by_path.items()]))
    )
    print(table("Python, by room", rooms))
    proof = sum(rooms[name][1] for name in PROOF if name in rooms)
    other_lines = sum(python.values()) - proof
    print(f"Proof ({', '.join(PROOF)}): {proof:,} lines, {proof / other_lines:.2f} of the other {other_lines:,}\n")
    largest = sorted(python.items(), key=lambda item: -item[1])[:LARGEST]
    print("Largest modules", *(f"{count:6,} {path}" for path, count in largest), sep="\n")


if __name__ == "__main__":
    main()
