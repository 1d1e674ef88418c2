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
    return Operator(
        name=name,
        package="toy",
        summary="",
        shape=("V",),
        rows=frozenset(),
        schemas={},
        fakes={},
        backends=backends,
        describe=describe,
    )


OPERATOR = make_operator(FUSED, QUICK, NATIVE, PLAIN)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Hold each test apart from the environment that the suite runs in, and see that it leaves nothing behind."""
    monkeypatch.setattr(dispatch, "_environment", {})
    monkeypatch.setattr(dispatch, "_strict", False)
    yield
    assert dispatch._blocks == ()
    assert dispatch._logs == dispatch._logs_of_choices == []


def test_the_first_backend_that_can_run_is_chosen():
    assert choose(make_operator(NATIVE, PLAIN), CPU) is NATIVE
    assert choose(make_operator(PLAIN, NATIVE), CPU) is PLAIN


def test_a_backend_beyond_its_limits_is_passed_over():
    even = Call(CUDA.device, CUDA.dtype, CUDA.arch, {"V": 8})
    assert choose(OPERATOR, even) is FUSED
    assert choose(OPERATOR, CUDA) is NATIVE


def test_a_backend_that_promises_less_is_chosen_only_by_name():
    assert choose(OPERATOR, CPU) is NATIVE
    assert choose(OPERATOR, CPU, "quick") is QUICK


def test_a_backend_may_be_there_by_name_only():
    shy = Backend("shy", "toy", {"cpu": INVARIANT, "cuda": INVARIANT}, by_name=frozenset({"cpu"}))
    operator = make_operator(shy, PLAIN)
    assert choose(operator, CUDA) is shy
    assert choose(operator, CPU) is PLAIN
    assert choose(operator, CPU, "shy") is shy
    assert "asked for by name" in str(dispatch.explain_call(operator, CPU)[0])


def test_promises_are_those_of_the_device_of_the_call():
    backend = Backend("mixed", "toy", {"cpu": INVARIANT, "cuda": REPEATABLE})
    operator = make_operator(backend, PLAIN)
    assert choose(operator, CPU) is backend
    assert choose(operator, CUDA) is PLAIN


def test_an_exception_in_limits_propagates():
    def limits(call):
        raise ZeroDivisionError("a bug in limits")

    operator = make_operator(Backend("broken", "toy", {"cpu": INVARIANT}, limits), NATIVE)
    for attempt in (lambda: choose(operator, CPU), lambda: choose(operator, CPU, "broken")):
        with pytest.raises(ZeroDivisionError, match="a bug in limits"):
            attempt()
    assert choose(operator, CPU, "native") is NATIVE


def test_a_forced_backend_that_cannot_run_says_why():
    with pytest.raises(
        BackendUnavailable, match=r"backend: grpo_loss cannot run on 'fused': runs on cuda, but the ten"
    ):
        choose(OPERATOR, CPU, "fused")
    with pytest.raises(BackendUnavailable, match=r"backend: grpo_loss cannot run on 'fused': V is odd$"):
        choose(OPERATOR, CUDA, "fused")


def test_backend_unavailable_is_a_value_error():
    assert issubclass(BackendUnavailable, ValueError)


def test_where_no_backend_can_run_every_reason_is_given():
    reasons = (
        r"backend: no backend of grpo_loss can run this call; fused: runs on cuda, but the tensors are on cpu; "
        r"quick: does not promise invariant on cpu; ask for it by name to use it anyway$"
    )
    with pytest.raises(BackendUnavailable, match=reasons):
        choose(make_operator(FUSED, QUICK), CPU)


def test_meta_tensors_are_told_of_fake_ones():
    with pytest.raises(BackendUnavailable, match=r"tensors on meta hold no values; .*FakeTensorMode to get shapes"):
        choose(OPERATOR, Call.of(torch.zeros(1, device="meta")))


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="grpo_loss has no backend 'cuda'; it has: auto, fused, quick, native, plain"):
        choose(OPERATOR, CPU, "cuda")


def test_use_backend_forces_inside_its_block_only():
    with use_backend(grpo_loss="plain"):
        assert choose(OPERATOR, CPU) is PLAIN
        assert choose(make_operator(QUICK, NATIVE, name="det_gemm"), CPU) is NATIVE
    assert choose(OPERATOR, CPU) is NATIVE


def test_use_backend_nests_and_auto_lifts_an_outer_choice():
    with use_backend(grpo_loss="plain", det_gemm="plain"):
        with use_backend(grpo_loss="quick"):
            assert choose(OPERATOR, CPU) is QUICK
            assert choose(make_operator(NATIVE, PLAIN, name="det_gemm"), CPU) is PLAIN
        with use_backend(grpo_loss="auto"):
            assert choose(OPERATOR, CPU) is NATIVE
        assert choose(OPERATOR, CPU) is PLAIN


def test_use_backend_restores_after_an_exception():
    with pytest.raises(KeyError), use_backend(grpo_loss="plain"), use_backend(grpo_loss="quick"):
        raise KeyError
    assert choose(OPERATOR, CPU) is NATIVE


def test_one_use_backend_can_be_entered_again():
    forced = use_backend(grpo_loss="plain")
    with forced:
        with forced:
            assert choose(OPERATOR, CPU) is PLAIN
        assert choose(OPERATOR, CPU) is PLAIN
    assert choose(OPERATOR, CPU) is NATIVE


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


def test_the_argument_wins_over_use_backend():
    with use_backend(grpo_loss="plain"):
        assert choose(OPERATOR, CPU, "quick") is QUICK
        assert choose(OPERATOR, CPU, "auto") is NATIVE


def test_use_backend_takes_an_alias():
    with use_backend(logp="plain"):
        assert choose(make_operator(NATIVE, PLAIN, name="fused_logp"), CPU) is PLAIN


def test_use_backend_refuses_a_name_that_is_no_operator():
    with pytest.raises(ValueError, match="use_backend: 'no_such' is not an operator; known: det_attention, det_gemm,"):
        use_backend(no_such="native")


def test_a_forced_backend_is_not_replaced_where_it_cannot_run():
    with use_backend(grpo_loss="fused"), pytest.raises(BackendUnavailable, match="cannot run on 'fused'"):
        choose(OPERATOR, CPU)


def test_strict_forbids_native_on_a_gpu_only(monkeypatch):
    monkeypatch.setattr(dispatch, "_strict", True)
    assert choose(OPERATOR, CPU) is NATIVE
    assert choose(OPERATOR, CUDA) is PLAIN
    with pytest.raises(BackendUnavailable, match="native: RL_KERNELS_STRICT forbids the native backend on a GPU"):
        choose(make_operator(FUSED, NATIVE), CUDA)


def test_strict_leaves_native_to_those_who_ask_for_it(monkeypatch):
    monkeypatch.setattr(dispatch, "_strict", True)
    assert choose(OPERATOR, CUDA, "native") is NATIVE


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


def test_a_call_that_cannot_run_is_not_recorded():
    with record_dispatch() as log, pytest.raises(BackendUnavailable):
        choose(OPERATOR, CPU, "fused")
    assert log == []


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


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("", {}),
        ("linear_logp=triton", {"linear_logp": "triton"}),
        (" linear_logp=triton , logp = native,", {"linear_logp": "triton", "fused_logp": "native"}),
    ],
)
def test_parse_forced(text, forced):
    assert dispatch.parse_forced(text) == forced


@pytest.mark.parametrize("text", ["linear_logp", "=triton", "linear_logp=", "no_such=native"])
def test_parse_forced_names_the_variable_that_is_malformed(text):
    with pytest.raises(ValueError, match=r"^RL_KERNELS_BACKEND: "):
        dispatch.parse_forced(text)


@pytest.fixture
def prepared():
    """A function that counts how often it looks at its arguments."""
    looked = []

    @dispatch.remembered_choice
    def prepare(x, limit, strict):
        looked.append(tuple(x.shape))
        if x.numel() > limit:
            raise ValueError(f"x: expected at most {limit}, got {x.numel()}")
        return f"chosen {len(looked)}"

    return prepare, looked


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_choice_is_made_once_for_arguments_of_each_kind(prepared):
    prepare, looked = prepared
    assert {prepare(torch.zeros(2), 3, True) for _ in range(3)} == {"chosen 1"}
    others = (torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, device="meta"), torch.zeros(4)[::2])
    strange = torch.nn.Parameter(torch.zeros(2)), torch._neg_view(torch.zeros(2)), torch.zeros(2).to_sparse()
    for x in (*others, *strange):
        prepare(x, 3, True)
    # It has no strides, and is looked at each time.
    rows = torch.zeros(1, 2).to_sparse_csr()
    assert [prepare(rows, 3, True) for _ in range(2)] == ["chosen 9", "chosen 10"]
    prepare(torch.zeros(2), 4, True)
    # Equal, and of other types.
    prepare(torch.zeros(2), 3, 1)
    prepare(torch.zeros(2), 3.0, True)
    assert len(looked) == 13
    for _ in range(2):
        with pytest.raises(ValueError, match="x: expected at most 3, got 4"):
            prepare(torch.zeros(4), 3, True)
        # What has no hash is looked at each time.
        with pytest.raises(TypeError):
            prepare(torch.zeros(2), [3], True)
    assert len(looked) == 17


def test_no_choice_is_remembered_where_it_is_recorded_or_forced(prepared, monkeypatch):
    prepare, looked = prepared
    x = torch.zeros(2)
    prepare(x, 3, True)
    with record_dispatch():
        prepare(x, 3, True)
    with use_backend(grpo_loss="native"):
        prepare(x, 3, True)
    monkeypatch.setattr(dispatch, "_environment", {"det_gemm": "native"})
    prepare(x, 3, True)
    monkeypatch.setattr(dispatch, "_environment", {})
    monkeypatch.setattr(dispatch, "_strict", True)
    prepare(x, 3, True)
    assert len(looked) == 5
    prepare(x, 3, True)
    assert len(looked) == 5


def test_choices_can_be_recorded_while_calls_remember_theirs(prepared):
    prepare, looked = prepared
    x = torch.zeros(2)
    prepare(x, 3, True)
    with record_dispatch(every_call=False) as log:
        prepare(x, 3, True)
        choose(OPERATOR, CPU)
    choose(OPERATOR, CPU)
    assert len(looked) == 1
    assert [choice.backend for choice in log] == ["native"]


def test_a_plan_is_made_once_for_arguments_of_each_kind_or_not_at_all():
    looked = []

    @dispatch.remembered_plan
    def plan(x):
        looked.append(x)
        return None if x is None or x.ndim == 0 else object()

    x = torch.zeros(2)
    found = plan(x)
    assert found is not None
    assert plan(torch.ones(2)) is found
    # That there is none is remembered too.
    assert [plan(torch.zeros(())) for _ in range(2)] == [plan(None) for _ in range(2)] == [None, None]
    assert len(looked) == 3
    with record_dispatch():
        assert plan(x) is None
    with use_backend(grpo_loss="native"):
        assert plan(torch.zeros(7)) is None
    assert len(looked) == 3
    dispatch.forget()
    assert plan(x) is not found
    assert len(looked) == 4


def test_what_is_remembered_of_choices_is_bounded(prepared, monkeypatch):
    prepare, looked = prepared
    monkeypatch.setattr(dispatch, "KEPT", 2)
    for size in (1, 2, 3, 1):
        prepare(torch.zeros(size), 3, True)
    assert len(looked) == 4
