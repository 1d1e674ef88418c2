"""The canary: other bits than recorded raise at the next eager call. A CPU with a faked record stands in for a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from rl_kernels.det_gemm import DetLinear, canary, det_gemm, det_gemm_dw
from rl_kernels.det_gemm.canary import CanaryMismatch

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def record(monkeypatch):
    """Let a digest be what is recorded for this CPU, and the canary be new."""

    def set_to(**digests):
        monkeypatch.setattr(canary, "recorded", lambda: {"cpu": digests})
        monkeypatch.setattr(canary, "_passed", set())

    return set_to


@pytest.fixture
def ran(monkeypatch):
    """Count the products of the canary."""
    count, real = [], canary.digest
    monkeypatch.setattr(canary, "digest", lambda *args: count.append(args) or real(*args))
    return count


def ones(dtype=torch.float32):
    return torch.ones(2, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype)


def test_right_bits_are_looked_at_once_for_each_dtype(record, ran):
    record(**{name: canary.digest(dtype, CPU, "native") for name, dtype in DTYPES.items()})
    ran.clear()
    for dtype in DTYPES.values():
        for _ in range(3):
            det_gemm(*ones(dtype))
            det_gemm_dw(ones(dtype)[0], ones(dtype)[0])
    assert len(ran) == 3


@pytest.mark.parametrize("call", [lambda: det_gemm(*ones()), lambda: det_gemm_dw(ones()[0], ones()[0])])
def test_other_bits_raise_at_every_call(record, call):
    record(fp32="0" * 64)
    for _ in range(2):
        with pytest.raises(CanaryMismatch, match=r"canary: native on cpu gives other bits than recorded for fp32"):
            call()
    det_gemm(*ones(torch.bfloat16))  # has no record, so nothing is said


def test_a_digest_follows_the_order_of_the_sum(monkeypatch):
    """What the canary is for: the same terms in another order, or with the digits of TF32, have another digest."""
    found = set()
    for name, change in {"chain": lambda x: x, "reversed": lambda x: x.flip(-1)}.items():

        def forward(a, b, bias, out_dtype, backend, change=change, name=name):
            total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
            left, right = change(a).float(), change(b.t()).float()
            for k in range(0, a.shape[1], 16):
                total = total + (left[:, None, k : k + 16] * right[None, :, k : k + 16]).sum(-1)
            return total

        monkeypatch.setitem(canary.ops, "forward", forward)
        found |= {canary.digest(dtype, CPU, "native") for dtype in DTYPES.values()}
    assert len(found) == 6


def test_operands_are_exact_and_the_same_everywhere():
    wide = [canary.operands(torch.float32, CPU)[0], canary.operands(torch.bfloat16, CPU)[0]]
    assert all(int(value.isfinite().sum()) == value.numel() for value in wide)
    assert not torch.equal(wide[0].bfloat16().float(), wide[0])
    # Frozen: a record is of these and no others.
    assert wide[1].flatten()[:4].tolist() == FROZEN
    assert float(wide[1].double().std()) > 0.1


FROZEN = [-0.48828125, -0.9453125, -0.00543212890625, -0.022705078125]


@pytest.mark.parametrize("action", ["warn", "off"])
def test_override(record, monkeypatch, action):
    record(fp32="0" * 64)
    monkeypatch.setattr(canary, "_default", action)
    if action == "warn":
        with pytest.warns(RuntimeWarning, match="RL_KERNELS_CANARY=warn only warns"):
            det_gemm(*ones())
    det_gemm(*ones())


def test_verify(record, monkeypatch):
    right = canary.digest(torch.float32, CPU, "native")
    record(fp32=right)
    assert canary.verify("cpu", torch.float32)
    assert not canary.verify("cpu", torch.bfloat16)
    record(fp32="0" * 64)
    with pytest.raises(CanaryMismatch):
        canary.verify("cpu", torch.float32)
    with pytest.warns(RuntimeWarning, match="gives other bits"):
        assert not canary.verify("cpu", torch.float32, on_mismatch="warn")
    with pytest.raises(ValueError, match="on_mismatch: expected one of 'raise', 'warn', 'off', got 'shout'"):
        canary.verify("cpu", on_mismatch="shout")


def test_deferred_under_compile(record):
    torch.compiler.reset()
    layer, x = DetLinear(3, 2), torch.ones(2, 3)
    record(fp32="0" * 64)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(CanaryMismatch):
        layer(x)


def test_deferred_while_a_graph_is_captured_or_a_tensor_is_fake(record, monkeypatch):
    record(fp32="0" * 64)
    with torch._subclasses.FakeTensorMode() as mode:
        canary.guard(mode.from_tensor(torch.ones(2, 3)), "native")
    monkeypatch.setattr(canary, "values_hidden", lambda value: True)
    det_gemm(*ones())
    monkeypatch.undo()
    record(fp32="0" * 64)
    with pytest.raises(CanaryMismatch):
        det_gemm(*ones())


def test_a_backend_that_promises_no_chain_is_not_looked_at(record, monkeypatch):
    record(fp32="0" * 64)
    backend = canary.OPERATOR.backend("native")
    monkeypatch.setitem(backend.promises, "cpu", frozenset({"repeatable"}))
    canary.guard(torch.ones(1), "native")


COMMAND = "import sys; from rl_kernels.core.cli import main; sys.exit(main(['list']))"


def with_canary(value, script):
    environment = {**os.environ, "RL_KERNELS_CANARY": value}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


def test_environment():
    assert canary._action("warn") == "warn"
    done = with_canary("loud", "import rl_kernels.det_gemm")
    assert done.returncode == 1
    assert "RL_KERNELS_CANARY: expected one of 'raise', 'warn', 'off', got 'loud'" in done.stderr


def test_a_command_says_what_is_wrong_with_the_environment_in_one_line():
    done = with_canary("loud", COMMAND)
    said = "rl-kernels list: RL_KERNELS_CANARY: expected one of 'raise', 'warn', 'off', got 'loud'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_an_empty_variable_is_one_that_is_not_set():
    done = with_canary("", "from rl_kernels.det_gemm import canary; print(canary._default)")
    assert (done.stdout, done.stderr) == ("raise\n", "")


def test_record_is_whole():
    for arch, digests in canary.recorded().items():
        assert arch.startswith(("sm", "gfx"))
        assert set(digests) == set(DTYPES)
        assert all(len(value) == 64 for value in digests.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_this_gpu_has_the_recorded_bits(dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("bits are recorded for sm90")
    assert canary.verify("cuda", dtype)
