"""``rl-kernels completion``, and the help of the commands of this package."""

import shutil
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    """Return the script for bash, made once."""
    script = tmp_path_factory.mktemp("completion") / "completion.sh"
    main = "import sys; from rl_kernels.core.commands import cli; sys.exit(cli.main())"
    with script.open("w", encoding="utf-8") as out:
        subprocess.run([sys.executable, "-c", main, "completion", "bash"], stdout=out, check=True)
    return script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", {"list", "explain", "doctor", "compile", "completion", "--version"}),
        ("do", {"doctor"}),
        ("compile --a", {"--arch"}),
        ("list --", {"--help", "--json"}),
        ("explain --dtype b", {"bf16"}),
        ("completion z", {"zsh"}),
        ("list z", set()),
    ],
)
def test_a_shell_completes(typed, expected, completion):
    words = ["rl-kernels", *typed.split(" ")]
    ask = f"source {completion}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _rl_kernels"
    found = subprocess.run(
        ["bash", "-c", f'{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True
    )
    assert not found.stderr
    assert expected <= {*found.stdout.split()}
    assert expected or not found.stdout.strip()
