"""The host side of the decode step of ``cuda-sm90`` without a GPU: PyTorch stands for the kernel; planted bugs show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.launches import Launch, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.gated_delta import DeltaCache
from rl_kernels.gated_delta.backends import native
from rl_kernels.gated_delta.backends.cuda_sm90 import decode
from rl_kernels.gated_delta.inputs import COUNT, Inputs

MODULES = ("rl_kernels.gated_delta.backends.cuda_sm90.decode",)
PROCESSORS, SIZE = 5, 128
DTYPES = {code: dtype for dtype, code in decode.CODES.items()}
BUGS = (
    Bug("strides of two operands swapped", "for x in shapes[:3]", "for x in (shapes[1], shapes[0], shapes[2])"),
    Bug("a row at an odd address is not copied", "and not x.data_ptr() % ALIGNED", ""),
    Bug("numbers that are not contiguous are not copied", "return x.is_contiguous()", "return True"),
    Bug("bits for too few blocks", "(heads * schedule.parts).bit_length()", "schedule.parts.bit_length()"),
    Bug("types of g and beta swapped", "inputs[3:5]", "inputs[4:2:-1]"),
    Bug("keys are always normalized", "int(inputs.normalize_qk)", "1"),
    Bug("one part of a head", "(schedule.parts * group, key_heads", "(group, key_heads"),
)
FAILURES = (AssertionError, RuntimeError, ValueError, IndexError, KeyError)
Plant = Callable[[], AbstractContextManager[None]]


def stand_in(launch: Launch) -> None:
    """Compute the row by the native backend, and check the arguments against the shapes."""
    constants, (members, key_heads, batch), parts = launch.constants, launch.grid, launch.constants["PARTS"]
    assert members == parts * launch["group"]
    assert launch.block == 32 * (SIZE // parts // (16 * constants["TILES"]) + 6 * constants["SPREAD"])
    assert launch.shared == constants["SHARED"]
    assert launch.pdl
    assert members * key_heads < 1 << (32 - launch["shift"])
    assert launch["shift"] >= 16
    dtype, heads = DTYPES[constants["DTYPE"]], key_heads * launch["group"]

    def rows(name: str, count: int) -> torch.Tensor:
        base, strides = launch[name], (launch[f"{name}_batch"], launch[f"{name}_head"])
        assert base.dtype == dtype
        assert not base.data_ptr() % 16
        assert not any(stride % 8 for stride in strides)
        shape, step = (batch, 1, count, SIZE), (strides[0], SIZE, strides[1], 1)
        return base.as_strided(shape, step, base.storage_offset())

    def numbers(name: str) -> torch.Tensor:
        x = launch[name]
        assert x.dtype == DTYPES[launch[f"{name}_type"]]
        return x.as_strided((batch, 1, heads), (heads, heads, 1), x.storage_offset())

    q, k, v, g, beta = rows("q", key_heads), rows("k", key_heads), rows("v", heads), numbers("g"), numbers("beta")
    cache = DeltaCache(*(launch[name] for name in DeltaCache._fields))
    options = (None, None, None, launch["scale"], bool(launch["normalizes"]))
    launch["out"].copy_(native.continued(q, k, v, g, beta, *options, *cache))


def operands(batch: int, key_heads: int, heads: int, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, ...]:
    """Return operands of one token of each sequence."""
    sizes = (key_heads * SIZE, key_heads * SIZE, heads * SIZE)
    # Rows apart by an odd number, or at an odd address alone.
    odd, more = {"odd": (1, 0), "shifted": (1, 7)}.get(layout, (0, 0))
    whole = torch.randn(batch, 1, odd + sum(sizes) + more).to(dtype)[..., odd : odd + sum(sizes)]
    q, k, v = (x.unflatten(-1, (-1, SIZE)) for x in whole.split(sizes, -1))
    g, beta = -torch.rand(batch, 1, 2 * heads), torch.rand(batch, 1, heads).to(dtype)
    if layout == "plain":
        q, k, v = q.contiguous(), torch.cat((k, k), -1)[..., :SIZE], v.contiguous()
    return q, k, v, g[..., ::2] if layout == "odd" else g[..., :heads].contiguous(), beta


CALLS = (
    (2, 2, 2, torch.bfloat16, "plain", True),
    (1, 1, 2, torch.float16, "shifted", True),
    (2, 2, 4, torch.float16, "packed", True),
    (5, 3, 3, torch.bfloat16, "odd", False),
    (3, 1, 7, torch.float16, "packed", False),
)


def check_all(plant: Plant = nullcontext) -> None:
    recorder = Recorder({"decode": stand_in}, processors=PROCESSORS)
    for batch, key_heads, heads, dtype, layout, normalizes in CALLS:
        torch.manual_seed(0)
        token = operands(batch, key_heads, heads, dtype, layout)
        caches = [DeltaCache.empty(batch, key_heads, heads, SIZE, SIZE, dtype=dtype) for _ in range(2)]
        for cache in caches:
            cache.lengths.copy_(torch.arange(batch) * 63)
        options = (None, None, None, 0.1, normalizes)
        with plant(), recorder.watching(*MODULES), poisoned_empty():
            # The module may be a copy with a planted bug.
            launches = sys.modules[MODULES[0]].one_token(Inputs(*token, *options))
            got = launches(*token, *options, *caches[0])
        assert len(recorder.launches) == 1
        recorder.launches.clear()
        want = native.continued(*token, *options, *caches[1])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        for name, x, y in zip(DeltaCache._fields, *caches, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, msg=name)


def test_launches_match_the_shapes() -> None:
    check_all()


def test_no_sequences() -> None:
    token = [x[:0] for x in operands(1, 1, 2, torch.bfloat16, "plain")]
    cache = DeltaCache.empty(0, 1, 2, SIZE, SIZE, dtype=torch.bfloat16)
    arguments = (*token, None, None, None, 0.1, True, *cache)
    assert decode.one_token(Inputs(*arguments[:COUNT]))(*arguments).shape == (0, 1, 2, SIZE)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        check_all(partial(planted, MODULES, bug))


def test_schedules_for_any_number_of_heads() -> None:
    chosen = [decode.schedule_of(heads, 132).parts for heads in (1, 33, 34, 66, 67, 133, 1 << 20)]
    assert chosen == [4, 4, 2, 2, 1, 1, 1]
