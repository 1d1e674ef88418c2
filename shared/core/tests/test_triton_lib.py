"""Where a Triton backend can run: reasons, not surprises."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.triton_lib import launch

CPU = Call(torch.device("cpu"), torch.float32, "cpu")
CUDA = Call(torch.device("cuda"), torch.float32, "sm90")


@pytest.mark.parametrize(
    ("call", "installed", "interpreted", "reason"),
    [
        (CUDA, True, False, None),
        (CUDA, True, True, None),
        (CUDA, False, False, "pip install 'rl-kernels-core[triton]'"),
        (CPU, True, True, None),
        (CPU, True, False, "TRITON_INTERPRET=1"),
        (CPU, False, True, "not installed"),
        (Call(CUDA.device, torch.float64, "sm90"), True, False, "FP64 is for the native backend"),
    ],
)
def test_reasons(call, installed, interpreted, reason, monkeypatch):
    monkeypatch.setattr(launch, "INSTALLED", installed)
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    found = launch.triton_backend("toy").why_not(call)
    assert found is None if reason is None else reason in found


def test_asking_imports_no_triton(run_python):
    code = "import sys; from rl_kernels.core.triton_lib.launch import why_not; assert 'triton' not in sys.modules"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_switched_for_a_tensor_of_the_cpu():
    with launch.device_of(torch.zeros(1)):
        pass
