from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from threading import Barrier

import pytest
import torch

from rl_kernels.core import dispatch
from rl_kernels.core.dispatch import BackendUnavailable, Choice, Verdict, choose, explain, record_dispatch, use_backend
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry

CPU = Call(torch.device("cpu"), torch.float32, "cpu", {"V": 7})
CUDA = Call(torch.device("cuda"), torch.float32, "sm90", {"V": 7})

FUSED = Backend("fused", "toy", {"cuda": INVARIANT}, lambda call: "V is odd" if call.traits["V"] % 2 else None)
QUICK = Backend("quick", "toy", {"cpu": REPEATABLE, "cuda": REPEATABLE})
NATIVE = Backend("native", "toy", {"cpu": INVARIANT, "cuda": INVARIANT})
PLAIN = Backend("plain", "toy", {"cpu": INVARIANT, "cuda": INVARIANT})


def make_operator(*backends, name="grpo_loss", describe=Call.of):
    return Operator(name, "toy", "", ("V",), frozenset(), {}, {}, backends, describe)


OPERATOR = make_operator(FUSED, QUICK, NATIVE, PLAIN)


pytestmark = pytest.mark.usefixtures("clean_dispatch")


@pytest.mark.smoke
def test_the_first_backend_that_can_run_and_promises_enough_is_chosen():
    assert choose(make_operator(NATIVE, PLAIN), CPU) is NATIVE
    assert choose(make_operator(PLAIN, NATIVE), CPU) is PLAIN
    even = Call(CUDA.device, CUDA.dtype, CUDA.arch, {"V": 8})
    assert choose(OPERATOR, even) is FUSED
    assert choose(OPERATOR, CUDA) is NATIVE
    assert choose(OPERATOR, CPU) is NATIVE
    assert choose(OPERATOR, CPU, "quick") is QUICK
    # Promises are those of the device of the call.
    mixed = Backend("mixed", "toy", {"cpu": INVARIANT, "cuda": REPEATABLE})
    assert choose(make_operator(mixed, PLAIN), CPU) is mixed
    assert choose(make_operator(mixed, PLAIN), CUDA) is PLAIN


def test_a_backend_may_be_there_by_name_only():
    shy = Backend("shy", "toy", {"cpu": INVARIANT, "cuda": INVARIANT}, by_name=frozenset({"cpu"}))
    operator = make_operator(shy, PLAIN)
    assert choose(operator, CUDA) is shy
    assert choose(operator, CPU) is PLAIN
    assert choose(operator, CPU, "shy") is shy
    assert "asked for by name" in str(dispatch.explain_call(operator, CPU)[0])


def test_an_exception_in_limits_propagates():
    def limits(call):
        raise ZeroDivisionError("a bug in limits")

    operator = make_operator(Backend("broken", "toy", {"cpu": INVARIANT}, limits), NATIVE)
    for attempt in (lambda: choose(operator, CPU), lambda: choose(operator, CPU, "broken")):
        with pytest.raises(ZeroDivisionError, match="a bug in limits"):
            attempt()
    assert choose(operator, CPU, "native") is NATIVE


CANNOT = "backend: grpo_loss cannot run on 'fused': "
NONE = (
    "backend: no backend of grpo_loss can run this call; fused: runs on cuda, but the tensors are on cpu; "
    "quick: does not promise invariant on cpu; ask for it by name to use it anyway$"
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("error", "message", "operator", "call", "name"),
    [
        (BackendUnavailable, f"{CANNOT}runs on cuda, but the ten", OPERATOR, CPU, "fused"),
        (BackendUnavailable, f"{CANNOT}V is odd$", OPERATOR, CUDA, "fused"),
        (BackendUnavailable, NONE, make_operator(FUSED, QUICK), CPU, None),
        (
            BackendUnavailable,
            "tensors on meta hold no values; .*FakeTensorMode to get shapes",
            *(OPERATOR, Call.of(torch.zeros(1, device="meta")), None),
        ),
        (
            ValueError,
            "grpo_loss has no backend 'cuda'; it has: auto, fused, quick, native, plain",
            OPERATOR,
            CPU,
            "cuda",
        ),
    ],
)
def test_a_call_that_no_backend_can_run_says_why(error, message, operator, call, name):
    with record_dispatch() as log, pytest.raises(error, match=message) as caught:
        choose(operator, call, name)
    assert isinstance(caught.value, ValueError)
    assert log == []


def test_use_backend_forces_inside_its_block_only():
    other = make_operator(QUICK, NATIVE, PLAIN, name="det_gemm")
    with use_backend(grpo_loss="plain"):
        assert choose(OPERATOR, CPU) is PLAIN
        assert choose(other, CPU) is NATIVE
        # The argument wins.
        assert choose(OPERATOR, CPU, "quick") is QUICK
        assert choose(OPERATOR, CPU, "auto") is NATIVE
    assert choose(OPERATOR, CPU) is NATIVE
    with use_backend(grpo_loss="plain", det_gemm="plain"):
        with use_backend(grpo_loss="quick"):
            assert choose(OPERATOR, CPU) is QUICK
            assert choose(other, CPU) is PLAIN
        with use_backend(grpo_loss="auto"):
            assert choose(OPERATOR, CPU) is NATIVE
        assert choose(OPERATOR, CPU) is PLAIN
    with pytest.raises(KeyError), use_backend(grpo_loss="plain"), use_backend(grpo_loss="quick"):
        raise KeyError
    assert choose(OPERATOR, CPU) is NATIVE
    forced = use_backend(grpo_loss="plain")
    with forced:
        with forced:
            assert choose(OPERATOR, CPU) is PLAIN
        assert choose(OPERATOR, CPU) is PLAIN
    assert choose(OPERATOR, CPU) is NATIVE
    with use_backend(logp="plain"):
        assert choose(make_operator(NATIVE, PLAIN, name="fused_logp"), CPU) is PLAIN


def test_use_backend_replaces_nothing_and_knows_its_operators():
    with use_backend(grpo_loss="fused"), pytest.raises(BackendUnavailable, match="cannot run on 'fused'"):
        choose(OPERATOR, CPU)
    with pytest.raises(ValueError, match="use_backend: 'no_such' is not an operator; known: causal_conv1d,"):
        use_backend(no_such="native")


def test_threads_that_enter_and_leave_in_turn_leave_nothing_forced():
    first, second = use_backend(grpo_loss="plain"), use_backend(grpo_loss="quick")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert choose(OPERATOR, CPU) is QUICK
    second.__exit__(None, None, None)
    assert choose(OPERATOR, CPU) is NATIVE


def test_many_threads_in_one_block():
    forced, start = use_backend(grpo_loss="plain"), Barrier(4)

    def work():
        start.wait()
        for _ in range(200):
            with forced:
                assert choose(OPERATOR, CPU) is PLAIN

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert choose(OPERATOR, CPU) is NATIVE


def test_strict_forbids_native_on_a_gpu_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "_strict", True)
    assert choose(OPERATOR, CPU) is NATIVE
    assert choose(OPERATOR, CUDA) is PLAIN
    assert choose(OPERATOR, CUDA, "native") is NATIVE
    with pytest.raises(BackendUnavailable, match="native: RL_KERNELS_STRICT forbids the native backend on a GPU"):
        choose(make_operator(FUSED, NATIVE), CUDA)


def test_record_dispatch_tells_forced_from_automatic():
    with record_dispatch() as log:
        choose(OPERATOR, CPU)
        choose(OPERATOR, CUDA, "quick")
        with use_backend(grpo_loss="plain"):
            choose(OPERATOR, CPU)
            choose(OPERATOR, CPU, "auto")
    choose(OPERATOR, CPU)
    assert log == [
        Choice("grpo_loss", "native", "cpu", forced=False),
        Choice("grpo_loss", "quick", "cuda", forced=True),
        Choice("grpo_loss", "plain", "cpu", forced=True),
        Choice("grpo_loss", "native", "cpu", forced=False),
    ]


def test_record_dispatch_nests_and_ends_with_an_exception():
    with record_dispatch() as outer:
        with record_dispatch() as inner:
            choose(OPERATOR, CPU)
        with pytest.raises(KeyError), record_dispatch():
            raise KeyError
        choose(OPERATOR, CPU)
    assert (len(outer), len(inner)) == (2, 1)


def test_explain_gives_a_verdict_on_every_backend(monkeypatch, make_module):
    operator = make_operator(FUSED, QUICK, NATIVE, PLAIN, describe=lambda x, *, size: Call.of(x, V=size))
    make_module("toy", OPERATOR=operator)
    found = {"grpo_loss": EntryPoint("grpo_loss", "toy:OPERATOR", GROUP)}
    monkeypatch.setattr(dispatch, "kernel_registry", KernelRegistry(found))
    assert explain("grpo_loss", torch.zeros(2), size=8) == [
        Verdict("fused", "runs on cuda, but the tensors are on cpu", chosen=False),
        Verdict("quick", "does not promise invariant on cpu; ask for it by name to use it anyway", chosen=False),
        Verdict("native", None, chosen=True),
        Verdict("plain", None, chosen=False),
    ]


def test_explain_records_nothing_and_names_what_it_prints():
    with record_dispatch() as log:
        verdicts = dispatch.explain_call(OPERATOR, CUDA)
    assert log == []
    assert [str(verdict) for verdict in verdicts] == [
        "fused: V is odd",
        "quick: does not promise invariant on cuda; ask for it by name to use it anyway",
        "native: chosen",
        "plain: can run, comes after the chosen one",
    ]


def test_parse_forced():
    assert dispatch.parse_forced("") == {}
    assert dispatch.parse_forced("linear_logp=triton") == {"linear_logp": "triton"}
    found = dispatch.parse_forced(" linear_logp=triton , logp = native,")
    assert found == {"linear_logp": "triton", "fused_logp": "native"}
    for text in ("linear_logp", "=triton", "linear_logp=", "no_such=native"):
        with pytest.raises(ValueError, match=r"^RL_KERNELS_BACKEND: "):
            dispatch.parse_forced(text)
