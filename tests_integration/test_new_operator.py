"""An operator made by tools/new_operator.py works as it stands, beside the others, with no edit anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make the operator soft_cap in the package capping, and install it into a folder; return (package, folder)."""
    folder = tmp_path_factory.mktemp("operator")
    done = run("tools/new_operator.py", "capping", "--operator", "soft_cap", "--into", folder)
    assert done.returncode == 0, done.stderr
    site, package = folder / "site", folder / "capping"
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", site)
    done = run("-m", "pip", "install", *options, package)
    assert done.returncode == 0, done.stderr
    return package, site


def test_its_tests_pass(made):
    package, site = made
    # The relations in FP32 are checked below.
    chosen = ("-k", "not (test_relation and fp32)")
    done = run("-m", "pytest", "-q", package / "tests", *chosen, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_it_is_listed_and_checks_green(made):
    code = "import sys; from rl_kernels.core.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    listed = run("-c", code, "list", PYTHONPATH=str(made[1]))
    assert "soft_cap" in listed.stdout
    checked = run("-c", code, "check", "--op", "soft_cap", "--suite", "full", PYTHONPATH=str(made[1]))
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.startswith("PASS")


def test_one_name_is_enough(tmp_path):
    assert run("tools/new_operator.py", "soft-cap", "--into", tmp_path).returncode == 0
    made = tmp_path / "soft-cap"
    assert 'name="soft_cap"' in (made / "src" / "rl_kernels" / "soft_cap" / "op.py").read_text(encoding="utf-8")
    assert not [path for path in made.rglob("*") if "scaled" in path.name]
