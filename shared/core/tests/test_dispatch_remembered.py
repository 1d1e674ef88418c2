"""Choices that are remembered for calls of one kind."""

import pytest
import torch

from rl_kernels.core import calls, dispatch
from rl_kernels.core.dispatch import choose, record_dispatch, use_backend
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator

pytestmark = pytest.mark.usefixtures("clean_dispatch")


@pytest.fixture
def prepared():
    """A function that counts how often it looks at its arguments."""
    looked = []

    @dispatch.remembered
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
    for name, value, usual in (("_environment", {"det_gemm": "native"}, {}), ("_strict", True, True)):
        monkeypatch.setattr(dispatch, name, value)
        prepare(x, 3, True)
        monkeypatch.setattr(dispatch, name, usual)
    assert len(looked) == 5
    prepare(x, 3, True)
    assert len(looked) == 5


def test_choices_can_be_recorded_while_calls_remember_theirs(prepared):
    backend = Backend("native", "toy", {"cpu": INVARIANT})
    operator = Operator("grpo_loss", "toy", "", ("V",), frozenset(), {}, {}, (backend,), Call.of)
    prepare, looked = prepared
    x = torch.zeros(2)
    prepare(x, 3, True)
    with record_dispatch(every_call=False) as log:
        prepare(x, 3, True)
        choose(operator, Call.of(x))
    choose(operator, Call.of(x))
    assert len(looked) == 1
    assert [choice.backend for choice in log] == ["native"]


def test_what_is_remembered_of_choices_is_bounded(prepared, monkeypatch):
    prepare, looked = prepared
    monkeypatch.setattr(calls, "SIZE", 2)
    for size in (1, 2, 3, 1):
        prepare(torch.zeros(size), 3, True)
    assert len(looked) == 4
