"""Canaries: other bits than recorded raise at the first eager call. A CPU with a made-up record stands in for a GPU."""

import contextlib
import sys
import threading
import time
from types import ModuleType

import pytest
import torch

from rl_kernels.core import canary
from rl_kernels.core.canary import CanaryMismatch
from rl_kernels.core.dispatch import choose, record_dispatch, remembered, without_canaries
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator

CPU = torch.device("cpu")
WRONG = "0" * 64


def made(**promises):
    backend = Backend("native", "toy", {"cpu": INVARIANT, "cuda": INVARIANT, **promises})
    return Operator("toy", "toy", "", (), frozenset(), {}, {}, (backend,), Call.of, canary="toy_canary")


OPERATOR = made()


def call(dtype=torch.float32, device=CPU):
    return Call(device, dtype, "cpu")


@pytest.fixture
def runs(monkeypatch):
    """The operator's canary, with nothing compared so far; returns the dtypes and backends of its runs."""
    made_calls = []

    def results(dtype, device, backend):
        made_calls.append((dtype, backend))
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        # A canary calls the operator itself, which chooses a backend.
        choose(OPERATOR, call(dtype, device), backend)
        yield canary.numbers(3, 5, salt=1, dtype=dtype, device=CPU)

    module = ModuleType("toy_canary")
    module.results = module.gradients = results
    monkeypatch.setitem(sys.modules, "toy_canary", module)
    monkeypatch.setattr(canary, "_passed", set())
    monkeypatch.setattr(canary, "_owed", set())
    return made_calls


@pytest.fixture
def record(monkeypatch):
    def set_to(**digests):
        known = {"cpu": {"native": {dtype: {"forward": each} for dtype, each in digests.items()}}}
        monkeypatch.setattr(canary, "records_of", lambda canary: known)

    return set_to


def right(dtype=torch.float32):
    return canary.digest([canary.numbers(3, 5, salt=1, dtype=dtype, device=CPU)])


def test_right_bits_are_looked_at_once_for_each_dtype(runs, record):
    record(fp32=right(), bf16=right(torch.bfloat16))
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert choose(OPERATOR, call(dtype)).name == "native"
    # Nothing is recorded for FP16.
    assert runs == [(torch.float32, "native"), (torch.bfloat16, "native")]


def test_other_bits_raise_at_every_call(runs, record):
    record(fp32=WRONG)
    chosen = remembered(lambda x: choose(OPERATOR, Call.of(x)).name)
    for _ in range(2):
        with pytest.raises(CanaryMismatch, match=r"canary: native of toy on cpu gives other bits"):
            chosen(torch.ones(2))
    assert chosen(torch.ones(2, dtype=torch.bfloat16)) == "native"
    assert len(runs) == 2


@pytest.mark.parametrize("action", ["warn", "off"])
def test_override(runs, record, monkeypatch, action):
    record(fp32=WRONG)
    monkeypatch.setattr(canary, "action", action)
    warns = pytest.warns(RuntimeWarning, match="RL_KERNELS_CANARY=warn only warns")
    with warns if action == "warn" else contextlib.nullcontext():
        choose(OPERATOR, call())
    choose(OPERATOR, call())
    assert len(runs) == (action == "warn")


def test_a_kind_first_seen_by_the_checker_is_compared_later(runs, record):
    record(fp32=WRONG)
    with canary.suspended():
        choose(OPERATOR, call())
    with pytest.raises(CanaryMismatch):
        choose(OPERATOR, call())
    chosen = remembered(lambda x: choose(OPERATOR, Call.of(x)).name)
    with without_canaries(), without_canaries():
        chosen(torch.ones(2))
    with pytest.raises(CanaryMismatch):
        chosen(torch.ones(2))


def test_threads_wait_for_the_first(runs, record, monkeypatch):
    """While one thread compares, another must not pass."""
    record(fp32=WRONG)
    inside, errors = threading.Event(), []
    slow = sys.modules["toy_canary"].results

    def results(*args):
        inside.set()
        time.sleep(0.2)
        yield from slow(*args)

    monkeypatch.setattr(sys.modules["toy_canary"], "results", results)

    def first():
        with contextlib.suppress(CanaryMismatch):
            choose(OPERATOR, call())
        errors.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with pytest.raises(CanaryMismatch):
        choose(OPERATOR, call())
    thread.join()
    assert errors == ["first"]


def test_each_device_is_compared(runs, record, monkeypatch):
    record(fp32=right())
    monkeypatch.setattr(canary, "_without_modes", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for index in (0, 1, 0):
        choose(OPERATOR, Call(torch.device("cuda", index), torch.float32, "cpu"))
    assert len(runs) == 2


def test_under_a_transform_it_waits(runs, record):
    record(fp32=right())
    torch.func.vmap(lambda x: (choose(OPERATOR, call()), x)[1])(torch.ones(2))
    assert (len(runs), len(canary._owed)) == (0, 1)
    choose(OPERATOR, call())
    assert (len(runs), len(canary._owed)) == (1, 0)


def test_while_a_graph_is_captured_nothing_runs_and_nothing_is_kept(runs, record, monkeypatch):
    record(fp32=right())
    on_gpu = Call(torch.device("cuda", 0), torch.float32, "cpu")
    chosen = remembered(lambda x: choose(OPERATOR, on_gpu).name)
    monkeypatch.setattr(canary, "_without_modes", lambda device: contextlib.nullcontext())
    for is_capturing, count in ((True, 0), (True, 0), (False, 1), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_capturing=is_capturing: is_capturing)
        assert chosen(torch.ones(2)) == "native"
        assert len(runs) == count
    assert not canary._owed


def test_what_surrounds_the_call_changes_no_bit_and_records_one_choice(runs, record):
    record(fp32=right())
    around = torch._subclasses.FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)
    # Its own choices are not recorded.
    with around[0], around[1], around[2], record_dispatch() as log:
        choose(OPERATOR, call())
    assert (len(runs), len(log)) == (1, 1)


def test_a_backend_that_promises_nothing_is_not_compared(runs, record):
    record(fp32=WRONG)
    choose(made(cpu=REPEATABLE), call(), "native")
    assert not runs


def test_the_record_of_the_user_comes_first(runs, record, monkeypatch):
    record(fp32=WRONG)
    mine = {"cpu": {"toy": {"native": {"fp32": {"forward": right()}}}}}
    monkeypatch.setattr(canary, "records_of_user", mine)
    choose(OPERATOR, call())
    assert len(runs) == 1


def test_a_digest_sees_order_dtype_and_sign():
    one = torch.tensor([1.0, 0.0])
    found = [canary.digest([x]) for x in (one, one.flip(0), one.bfloat16(), -one, one[:1])]
    assert len(set(found)) == len(found)


def test_numbers_are_exact_and_the_same_everywhere():
    wide, narrow = (canary.numbers(40, 7, salt=1, dtype=dtype, device=CPU) for dtype in (torch.float32, torch.bfloat16))
    assert bool(wide.isfinite().all())
    assert not torch.equal(wide.bfloat16().float(), wide)
    assert float(wide.abs().max()) < 1.0
    # Frozen: a record is of these and no others.
    assert narrow.flatten()[:4].tolist() == [-0.48828125, -0.9453125, -0.00543212890625, -0.022705078125]
    assert canary.integers(4, below=10, salt=1, device=CPU).tolist() == [3, 8, 3, 4]
