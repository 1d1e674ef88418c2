"""``rl-kernels completion``, and the help of the commands of this package."""

import shutil
import subprocess

import pytest

EXPECTED = {
    "": {"list", "explain", "doctor", "compile", "completion", "--version"},
    "do": {"doctor"},
    "compile --a": {"--arch"},
    "list --": {"--help", "--json"},
    "explain --dtype b": {"bf16"},
    "completion z": {"zsh"},
    "list z": set(),
}
"""What is typed, and what a shell must offer."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_shell_completes(run_code, tmp_path):
    script = tmp_path / "completion.sh"
    main = "import sys; from rl_kernels.core.commands import cli; sys.exit(cli.main(sys.argv[1:]))"
    script.write_text(run_code(main, "completion", "bash").stdout, encoding="utf-8")
    for typed, expected in EXPECTED.items():
        words = ["rl-kernels", *typed.split(" ")]
        ask = f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _rl_kernels"
        command = ["bash", "-c", f'{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"']
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert not found.stderr
        assert expected <= {*found.stdout.split()}
        assert expected or not found.stdout.strip()
