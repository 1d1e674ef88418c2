"""The environment is read once, at import: each test is a fresh interpreter."""

import pytest

SCRIPT = """
import torch
from rl_kernels.core.dispatch import choose, use_backend
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator

backends = tuple(Backend(name, "toy", {"cpu": INVARIANT, "cuda": INVARIANT}) for name in ("native", "plain"))
operator = Operator("fused_logp", "toy", "", (), frozenset(), {}, {}, backends, Call.of)
cpu, cuda = (Call(torch.device(name), torch.float32, name) for name in ("cpu", "cuda"))
print(choose(operator, cpu).name, choose(operator, cpu, "auto").name, choose(operator, cuda).name, end=" ")
with use_backend(logp="native"):
    print(choose(operator, cpu).name)
"""


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({"RL_KERNELS_BACKEND": "grpo_loss=native,logp=plain"}, "plain native plain native"),
        ({"RL_KERNELS_STRICT": "1"}, "native native plain native"),
        ({"RL_KERNELS_STRICT": "0"}, "native native native native"),
    ],
    ids=["forced", "strict", "strict-off"],
)
def test_what_the_environment_forces(run_python, environment, chosen):
    done = run_python("-c", SCRIPT, **environment)
    assert (done.stdout.strip(), done.stderr) == (chosen, "")


def test_a_malformed_environment_is_refused_by_the_first_call(run_python):
    done = run_python("-c", SCRIPT, RL_KERNELS_BACKEND="no_such=plain")
    assert (done.returncode, done.stdout) == (1, "")
    assert "EnvironmentMistake: RL_KERNELS_BACKEND: 'no_such' is not an operator" in done.stderr


@pytest.mark.parametrize("value", ["zzz", "no_such=plain", "fused_logp="])
def test_a_command_says_what_is_wrong_with_the_environment_in_one_line(run_python, value):
    script = "import sys; from rl_kernels.core.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_python("-c", script, "list", RL_KERNELS_BACKEND=value)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rl-kernels list: RL_KERNELS_BACKEND: ")
    assert done.stderr.count("\n") == 1
