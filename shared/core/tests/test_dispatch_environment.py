"""The environment is read once, at import: each question is an interpreter of its own."""

import json
from pathlib import Path

import pytest

from rl_kernels.core.registry import kernel_registry

CHOOSE = """
import torch
from rl_kernels.core import canary
from rl_kernels.core.dispatch import choose, use_backend
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator

backends = tuple(Backend(name, "toy", {"cpu": INVARIANT, "cuda": INVARIANT}) for name in ("native", "plain"))
operator = Operator("fused_logp", "toy", "", (), frozenset(), {}, {}, backends, Call.of)
cpu, cuda = (Call(torch.device(name), torch.float32, name) for name in ("cpu", "cuda"))
print(choose(operator, cpu).name, choose(operator, cpu, "auto").name, choose(operator, cuda).name, end=" ")
with use_backend(logp="native"):
    print(choose(operator, cpu).name, canary.action, canary.records_of_user)
"""
COMMAND = "import sys; from rl_kernels.core.commands.cli import main; sys.exit(main(sys.argv[1:]))"
CALL = (
    "import torch; from rl_kernels.fused_logp import fused_logp; fused_logp(torch.zeros(2, 3), torch.zeros(2).long())"
)
OF_A_PACKAGE = Path(__file__).parents[3] / "packages" / "norm" / "src" / "rl_kernels" / "norm" / "canary.json"
"""A canary's record of another form."""


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({"RL_KERNELS_BACKEND": "grpo_loss=native,logp=plain"}, "plain native plain native raise {}"),
        ({"RL_KERNELS_STRICT": "1"}, "native native plain native raise {}"),
        ({"RL_KERNELS_STRICT": "0"}, "native native native native raise {}"),
        ({"RL_KERNELS_CANARY": "", "RL_KERNELS_CANARY_RECORD": ""}, "native native native native raise {}"),
        ({"RL_KERNELS_CANARY": "off"}, "native native native native off {}"),
    ],
)
def test_what_the_environment_forces(run_code, environment, chosen):
    done = run_code(CHOOSE, **environment)
    assert (done.stdout.strip(), done.stderr) == (chosen, "")


def test_a_malformed_environment_is_refused_by_the_first_call(run_code):
    done = run_code(CHOOSE, RL_KERNELS_BACKEND="no_such=plain")
    assert (done.returncode, done.stdout) == (1, "")
    assert "EnvironmentMistake: RL_KERNELS_BACKEND: 'no_such' is not an operator" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("RL_KERNELS_BACKEND", value, "") for value in ("zzz", "no_such=plain", "fused_logp=")),
        ("RL_KERNELS_CANARY", "loud", "expected one of 'raise', 'warn', 'off', got 'loud'"),
        ("RL_KERNELS_CANARY_RECORD", "no.json", "expected a file that `rl-kernels doctor"),
        ("RL_KERNELS_CANARY_RECORD", str(OF_A_PACKAGE), "expected a file that `rl-kernels doctor"),
    ],
)
def test_a_command_says_what_is_wrong_with_the_environment_in_one_line(run_code, name, value, said):
    done = run_code(COMMAND, "list", **{name: value})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"rl-kernels list: {name}: {said}")


@pytest.mark.skipif("fused_logp" not in kernel_registry.names(), reason="no operator is installed")
def test_a_canary_s_record_of_the_user(run_code, tmp_path):
    printed = run_code(COMMAND, "doctor", "--canary", "--json").stdout
    record = tmp_path / "mine.json"
    record.write_text(printed, encoding="utf-8")
    mine = {"RL_KERNELS_CANARY_RECORD": str(record)}
    table = run_code(COMMAND, "doctor", "--canary", **mine)
    assert table.returncode == 0
    assert all(line.endswith("as recorded") for line in table.stdout.splitlines()[1:])
    assert run_code(CALL, **mine).returncode == 0
    changed = json.loads(printed)
    digests = changed["cpu"]["fused_logp"]["native"]["fp32"]
    del digests["backward"]
    record.write_text(json.dumps(changed), encoding="utf-8")
    table = run_code(COMMAND, "doctor", "--canary", **mine)
    assert table.returncode == 0
    assert table.stdout.count("forward as recorded") == 1
    digests["forward"] = "0" * 64
    record.write_text(json.dumps(changed), encoding="utf-8")
    table = run_code(COMMAND, "doctor", "--canary", **mine)
    assert table.returncode == 1
    assert table.stdout.count("other bits than recorded") == 1
    refused = run_code(CALL, **mine)
    assert refused.returncode == 1
    assert "CanaryMismatch: canary: native of fused_logp on cpu gives other bits" in refused.stderr
