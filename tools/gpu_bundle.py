"""Pack the project for tests on a GPU machine without a network: `python tools/gpu_bundle.py`, after `nox -s build`.

The archive holds the wheels, the tests, and one command: unpack it there, then run `python rl-kernels-gpu/run.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "rl-kernels-gpu"
SCRIPTS = {"gpu_run.py": "run.py"}
SCRIPTS |= {name: name for name in ("limited.py", "gpu_record.py", "gpu_steps.py", "sanitize.py")}
SCRIPTS |= {name: name for name in ("sanitize_planted.py", "grpo_step.py", "grpo_policy.py")}


def packages() -> list[Path]:
    """Return the folder of every package, core first."""
    return [
        file.parent for folder in ("shared", "packages") for file in sorted(ROOT.glob(f"{folder}/*/pyproject.toml"))
    ]


def wheel_of(package: Path, dist: Path) -> Path:
    """Return the one wheel of a package; ``ValueError`` if there is none or more than one."""
    name = "rl_kernels" if package.name == "rl-kernels" else f"rl_kernels_{package.name.replace('-', '_')}"
    wheels = sorted(dist.glob(f"{name}-*.whl"))
    if len(wheels) != 1:
        raise ValueError(
            f"--wheels: expected one wheel {name}-*.whl in {dist}, found {len(wheels)}; run `nox -s build`"
        )
    return wheels[0]


def contents(dist: Path, extra: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield (file, its name in the archive)."""
    for package in packages():
        wheel = wheel_of(package, dist)
        yield wheel, f"wheels/{wheel.name}"
        for file in sorted((package / "tests").rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file, str(file.relative_to(ROOT))
        # Tests run the examples of guides.
        yield from ((file, str(file.relative_to(ROOT))) for file in package.glob("GUIDE.md"))
    extra_wheels = sorted(extra.glob("*.whl")) if extra else []
    if extra and not extra_wheels:
        raise ValueError(f"--extra-wheels: there is no wheel in {extra}")
    yield from ((wheel, f"wheels/{wheel.name}") for wheel in extra_wheels)
    # Fixtures that several packages share.
    yield from ((file, str(file.relative_to(ROOT))) for file in sorted(ROOT.glob("shared/conftest.py")))
    # pytest reads its settings from it, and takes its folder as the root of the tests.
    yield ROOT / "pyproject.toml", "pyproject.toml"
    yield from ((ROOT / "tools" / script, name) for script, name in SCRIPTS.items())


def pack(dist: Path, extra: Path | None, archive: Path) -> int:
    """Write the archive; return the number of its files."""
    files = list(contents(dist, extra))
    with tarfile.open(archive, "w:gz") as tar:
        for file, name in files:
            tar.add(file, f"{NAME}/{name}")
        commit_name = commit().encode()
        entry = tarfile.TarInfo(f"{NAME}/commit")
        entry.size = len(commit_name)
        tar.addfile(entry, BytesIO(commit_name))
    return len(files)


def commit() -> str:
    """Return the commit of this tree, marked if the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Pack the project for tests on a GPU machine without a network.")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument("--extra-wheels", type=Path, metavar="DIR", help="more wheels to pack, such as peers'")
    parser.add_argument("--out", type=Path, help=f"the archive (default: {NAME}.tar.gz next to the wheels)")
    args = parser.parse_args(argv)
    archive = args.out or args.wheels / f"{NAME}.tar.gz"
    try:
        count = pack(args.wheels, args.extra_wheels, archive)
    except ValueError as error:
        print(f"gpu_bundle: {error}", file=sys.stderr)
        return 2
    print(f"{archive}: {count} files; unpack it there, then: python {NAME}/run.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
