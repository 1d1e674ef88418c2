"""Every command of the documents works as printed: it is run, perhaps shortened, or it is said here why not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT, blocks, commands, documents

MODELS = """
import torch
from torch import nn

def make_one():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(5, 8)
"""
"""What `my_models.py:make_one` is."""
LISTED, SHORT, SMALL = (
    "--list",
    "--suite quick --relation repeatability --jobs 1",
    "--iters 1 --warmup 0 --compare eager",
)
AS_PRINTED = (
    r"rl-kernels (list|doctor|explain|completion|audit|demo --help)\b.*",
    r'eval "\$\(rl-kernels completion bash\)"',
    r"rl-kernels check --replay .*",
    r"python tools/bench_tables\.py --check",
    r"(export \w+=|unset )\S+",
    r"pip list .*",
)
SHORTENED = (
    (r"python tools/new_operator\.py .*", "--into ."),
    (r"rl-kernels check (?!.*--op).*", LISTED),
    (r"rl-kernels check .*--candidate.*", LISTED),
    (r"rl-kernels check .*", SHORT),
    (r"rl-kernels bench .*--op linear_logp .*--shapes.*", f"{SMALL} --shapes 4x16x99"),
    (r"rl-kernels bench .*--set (goals|objectives|host|decode|projections).*", "--help"),
    (r"rl-kernels bench( .*)?", SMALL),
    (r"rl-kernels demo( .*)?", "--help"),
    (r"python (tools/\w+\.py|-m rl_kernels\.\w+).*", "--help"),
)
"""What is put behind a command, of which the last says what counts."""
NOT_RUN = {
    r"python -m nox .*": "CI runs the sessions; their names are compared with the noxfile",
    r"(python -m )?pip (install|wheel) .*": "what is named is there: below; `nox -s build` installs",
    r"rl-kernels compile.*": "the session `kernels`",
    r"rl-kernels check --op scaled_add .*": "test_new_operator.py",
    r"python rl-kernels-gpu/run\.py .*|tar xzf .*": "needs a GPU and a bundle of `nox -s gpu`: test_gpu_tools.py",
    r"python -m verl\..*": "needs GPUs: the recipe says so",
    r"(place=|rm -r \$place|python -m venv|pytest packages/|git |cd ).*": "the shell's own, or the session `tests`",
}
"""What is not run here, and what tests it."""
ALL = sorted({command for file in documents() for command in commands(file)})


def rule_of(command: str) -> str | None:
    """Return what is put behind a command; None if it is not run, and a failed test if nobody has said."""
    for pattern in NOT_RUN:
        if re.fullmatch(pattern, command):
            return None
    for pattern in AS_PRINTED:
        if re.fullmatch(pattern, command):
            return ""
    for pattern, more in SHORTENED:
        if re.fullmatch(pattern, command):
            return more
    pytest.fail(f"no rule says how this command is tested: {command}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Return a function that runs a command in a folder with what the documents' commands name."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_logp.py").write_text(blocks(ROOT / "docs" / "checker.md", "python")[0], encoding="utf-8")
    (folder / "my_models.py").write_text(MODELS, encoding="utf-8")
    (folder / "tools").symlink_to(ROOT / "tools")
    (folder / "packages").mkdir()

    def model() -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=64, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "path" / "to" / "model")

    def ran(command: str) -> subprocess.CompletedProcess[str]:
        if "path/to/model" in command and not (folder / "path").exists():
            model()
        here = Path(sys.executable).parent
        environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )

    return ran


@pytest.mark.parametrize("command", ALL)
def test_command(command: str, run: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    more = rule_of(command)
    if more is None:
        return
    done = run(f"{command} {more}")
    assert "Traceback" not in done.stderr, done.stderr
    # An audit says by 1 that a bit differs, a check that something does not hold: both are what the page says.
    allowed = (0, 1) if re.search(r"audit|check", command) else (0,)
    assert done.returncode in allowed, done.stdout + done.stderr


@pytest.mark.parametrize("command", [command for command in ALL if "-m nox" in command])
def test_sessions_are_there(command: str) -> None:
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    words = shlex.split(command.partition("-m nox")[2])
    if "-s" in words:
        named = words[words.index("-s") + 1 :]
        asked = [word for word in named[: named.index("--") if "--" in named else None] if not word.startswith("&")]
        assert asked
        assert {word.partition("(")[0] for word in asked} <= sessions


@pytest.mark.parametrize("command", [command for command in ALL if re.match(r"(python -m )?pip install ", command)])
def test_what_is_installed_is_there(command: str) -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    words = shlex.split(command.partition("pip install")[2].partition("&&")[0])
    options = {word for word in words if word.startswith("-")} | {"constraints.txt"}
    for word in (word for word in words if word not in options):
        if word.startswith(".") or "/" in word:
            found = [folder for folder in ROOT.glob(word.removeprefix("./")) if folder.name != "__pycache__"]
            assert found, word
            assert all((folder / "pyproject.toml").exists() for folder in found), word
        else:
            name = re.split(r"[\[=<>]", word)[0]
            assert name in pinned | UNPINNED, word


UNPINNED = {"liger-kernel", "megatron-core", "rl-kernels-core", "verl"}
"""What pages name that no session here installs by a pin of constraints.txt."""
