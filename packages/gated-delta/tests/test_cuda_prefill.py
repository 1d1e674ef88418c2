"""The host side of prefill of ``cuda-sm90`` without a GPU: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.launches import Launch, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.gated_delta import DeltaCache
from rl_kernels.gated_delta.backends import native
from rl_kernels.gated_delta.backends.cuda_sm90 import prefill
from rl_kernels.gated_delta.inputs import COUNT, Inputs
from rl_kernels.gated_delta.op import _cuda_limits, describe

MODULES = tuple(f"rl_kernels.gated_delta.backends.cuda_sm90.{name}" for name in ("prefill", "backend"))
PLANTED = "rl_kernels.gated_delta.places", "rl_kernels.gated_delta.launches", *MODULES
PROCESSORS, SIZE = 12, 128
DTYPES = {code: dtype for dtype, code in prefill.CODES.items()}
BUGS = (
    Bug("strides of q for k", "*q.stride()[:3], *k.stride()[:3]", "*q.stride()[:3], *q.stride()[:3]"),
    Bug("an operand at an odd address is not copied", "and not x.data_ptr() % ALIGNED ", ""),
    Bug("types of g and beta swapped", "CODES[g.dtype], CODES[beta.dtype]", "CODES[beta.dtype], CODES[g.dtype]"),
    Bug("wide integers for narrow ones", "x.dtype == torch.int64", "x.dtype == torch.int32"),
    Bug("padding is not cleared", "if inputs.start is None else v.new_zeros(v.shape)", ""),
    Bug("too few slots of packed sequences", "CHUNK + 2 * sequences if", "CHUNK + sequences if"),
    Bug("no slot for the open chunk", "(CHUNK - 1) * is_cached", "0 * is_cached"),
    Bug("keys are always normalized", "int(inputs.normalize_qk)", "1"),
    Bug("a cache's state is left out", "held_state if initial is None", "None if initial is None"),
    Bug("heads of a small group left out", "key_heads * -(-group // HEADS)", "key_heads * (group // HEADS)"),
    Bug("half of the columns", "SIZE // WIDTH // self._parts", "1"),
    Bug("tokens are not counted", "else tokens - start.clamp(0, tokens)", "else tokens"),
)
FAILURES = (AssertionError, RuntimeError, ValueError, IndexError, KeyError, AttributeError)
Plant = Callable[[], AbstractContextManager[None]]


def integers(launch: Launch, name: str) -> torch.Tensor | None:
    """Return bounds or starts, whose width the kernel must know."""
    value: torch.Tensor | None = launch[name]
    assert value is None or value.dtype == (torch.int64 if launch[f"{name}_wide"] else torch.int32)
    return value


class StandIns:
    """PyTorch in place of both kernels; ``scan`` computes what ``prepare`` read."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}

    def prepare(self, launch: Launch) -> None:
        """Read the operands as the kernel does, and check the sizes."""
        dtype, key_heads, heads = DTYPES[launch.constants["DTYPE"]], launch["key_heads"], launch["heads"]
        bounds, tokens, sequences = integers(launch, "bounds"), launch["tokens"], launch["sequences"]
        batch = 1 if bounds is not None else sequences
        group = heads // key_heads
        slots = self.slots(launch, bounds)
        assert launch.grid[0] >= slots * key_heads * -(-group // 2)
        assert launch.block == 128
        assert launch.shared >= 4 * 64 * 128 + 2 * 64 * 68 * 4
        assert launch["units"].numel() >= slots * key_heads * 32768
        assert launch["items"].numel() >= slots * heads * 25088
        assert (launch["tail"] is None) == (launch["lengths"] is None)

        def rows(name: str) -> torch.Tensor:
            x, names = launch[name], ("batch", "token", "head")
            assert x.dtype == dtype
            assert not x.data_ptr() % 16
            strides = [launch[f"{name}_{dim}"] for dim in names]
            assert not any(stride % 8 for stride in strides)
            return x.as_strided((batch, tokens, key_heads, SIZE), (*strides, 1), x.storage_offset())

        def numbers(name: str) -> torch.Tensor:
            x = launch[name]
            assert x.dtype == DTYPES[launch[f"{name}_dtype"]]
            assert x.is_contiguous()
            return x.view(batch, tokens, heads)

        self.read = {
            "operands": (rows("q"), rows("k"), numbers("g"), numbers("beta")),
            "normalize": bool(launch["normalize"]),
            "same": [launch[name] for name in ("units", "items", "tail", "held_keys", "held_sums", "held_inverse")],
        }

    @staticmethod
    def slots(launch: Launch, bounds: torch.Tensor | None) -> int:
        """Return the slots that the kernels use."""
        held = [0] * launch["sequences"] if launch["lengths"] is None else (launch["lengths"] % 64).tolist()
        if bounds is None:
            assert launch["chunks"] * 64 >= launch["tokens"] + max(held)
            return launch["sequences"] * launch["chunks"]
        begins = bounds.tolist()
        spans = enumerate(pairwise(begins))
        return max(begin // 64 + 2 * s + -(-(held[s] + end - begin) // 64) for s, (begin, end) in spans if end > begin)

    def scan(self, launch: Launch) -> None:
        """Compute everything by the native backend."""
        parts, sequences, heads = launch.constants["PARTS"], launch["sequences"], launch["heads"]
        assert parts == (1 if 2 * sequences * heads <= PROCESSORS else 2)
        assert launch.grid == (sequences, heads, 2 // parts)
        assert launch.block == (160 if parts == 1 else 384)
        stage = -(-(32768 + 8192 * parts + 25088) // 1024) * 1024
        assert launch.shared >= launch.constants["STAGES"] * stage + 1024
        described = launch["v_map"]
        assert (described.box, described.swizzle) == ((1, 64, 1, 64), 128)
        names = ("units", "items", "tail", "held_keys", "held_sums", "held_inverse")
        assert all(x is launch[name] for x, name in zip(self.read["same"], names, strict=True))
        q, k, g, beta = self.read["operands"]
        bounds, starts = integers(launch, "bounds"), integers(launch, "starts")
        fields = (q, k, described.tensor, g, beta)
        options = (bounds, starts, launch["scale"], self.read["normalize"])
        if launch["lengths"] is None:
            out, state = native.forward(*fields, launch["initial"], *options, True)
            if launch["state"] is not None:
                launch["state"].copy_(state)
        else:
            assert launch["initial"] is launch["state"]
            held = ("state", "held_keys", "held_residuals", "held_sums", "held_inverse")
            lengths = launch["lengths"].clone()
            out = native.continued(*fields, None, *options, *(launch[name] for name in held), lengths)
        for row, start in enumerate([0] * len(out) if starts is None else starts.tolist()):
            launch["out"][row, start:] = out[row, start:]


def operands(
    batch: int, tokens: int, key_heads: int, heads: int, dtype: torch.dtype, layout: str
) -> list[torch.Tensor]:
    """Return q, k, v, g and beta."""
    sizes = (key_heads * SIZE, key_heads * SIZE, heads * SIZE)
    # Rows apart by an odd number, or at an odd address alone.
    odd, more = {"odd": (1, 0), "shifted": (1, 7)}.get(layout, (0, 0))
    whole = torch.randn(batch, tokens, odd + sum(sizes) + more).to(dtype)[..., odd : odd + sum(sizes)]
    q, k, v = (x.unflatten(-1, (-1, SIZE)) for x in whole.split(sizes, -1))
    if layout == "plain":
        q, k, v = (
            q.contiguous(),
            k.transpose(1, 2).contiguous().transpose(1, 2),
            v.transpose(1, 2).contiguous().transpose(1, 2),
        )
    g, beta = -torch.rand(batch, tokens, 2 * heads), torch.rand(batch, tokens, heads).to(dtype)
    return [q, k, v, g[..., ::2] if layout == "odd" else g[..., :heads].contiguous(), beta]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CALLS = (
    ((1, 100, 2, 4, torch.bfloat16, "plain"), {}),
    ((2, 66, 2, 6, torch.float16, "packed"), {"start": torch.tensor([0, 5])}),
    ((2, 20, 1, 1, torch.bfloat16, "odd"), {"start": int32(7, 20), "normalize": False}),
    ((1, 150, 1, 2, torch.bfloat16, "packed"), {"cu_seqlens": int32(0, 1, 2, 2, 3, 150)}),
    ((2, 3, 1, 2, torch.float16, "shifted"), {}),
    ((1, 9, 1, 2, torch.float16, "plain"), {"cu_seqlens": torch.tensor([0, 3, 9])}),
)


def run(name: str, arguments: tuple[Any, ...]) -> Any:
    """Prepare a raw op's launches, and run them; the backend may be a copy with a planted bug."""
    return getattr(sys.modules[MODULES[-1]], name).prepare(*arguments)(*arguments)


def check_call(recorder: Recorder, shape: tuple[Any, ...], choices: dict[str, Any], plant: Plant) -> None:
    torch.manual_seed(0)
    call = operands(*shape)
    bounds, start = choices.get("cu_seqlens"), choices.get("start")
    options = (bounds, start, 0.1, choices.get("normalize", True))
    inputs = Inputs(*call, None, *options)
    initial = torch.randn(inputs.state_shape)
    with plant(), recorder.watching(*MODULES), poisoned_empty():
        got = run("forward", (*call, initial, *options, True))
        alone = run("forward", (*call, None, *options, False))[0]
    want = native.forward(*call, initial, *options, True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(alone, native.forward(*call, None, *options, False)[0], rtol=0, atol=0)
    caches = [DeltaCache.from_recurrent(initial, call[0].shape[2], dtype=call[0].dtype) for _ in range(2)]
    for _ in range(2):
        with plant(), recorder.watching(*MODULES), poisoned_empty():
            row = run("continued", (*call, None, *options, *caches[0]))
        other = native.continued(*call, None, *options, *caches[1])
        torch.testing.assert_close(row, other, rtol=0, atol=0)
        for name, x, y in zip(DeltaCache._fields, *caches, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, msg=name)


def check_all(plant: Plant = nullcontext) -> None:
    stand_ins = StandIns()
    recorder = Recorder({"prepare": stand_ins.prepare, "scan": stand_ins.scan}, processors=PROCESSORS)
    for shape, choices in CALLS:
        check_call(recorder, shape, choices, plant)
    assert len(recorder.launches) == 8 * len(CALLS)


def test_launches_match_the_shapes() -> None:
    check_all()


def test_no_tokens() -> None:
    call = operands(2, 0, 1, 2, torch.bfloat16, "plain")
    options = (None, None, 0.1, True)
    initial = torch.randn(2, 2, SIZE, SIZE)
    out, state = run("forward", (*call, initial, *options, True))
    assert out.shape == (2, 0, 2, SIZE)
    torch.testing.assert_close(state, initial, rtol=0, atol=0)
    cache = DeltaCache.empty(2, 1, 2, SIZE, SIZE, dtype=torch.bfloat16)
    arguments = (*call, None, *options, *cache)
    assert len(arguments) == COUNT + len(cache)
    assert run("continued", arguments).shape == (2, 0, 2, SIZE)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        check_all(partial(planted, PLANTED, bug))


@pytest.mark.parametrize(
    ("size", "value_size", "dtype", "reason"),
    [(128, 128, torch.float32, "BF16 and FP16"), (64, 128, torch.float16, "Dk = 64"), (128, 256, torch.bfloat16, "Dv")],
)
def test_other_sizes_and_dtypes_go_to_triton(size: int, value_size: int, dtype: torch.dtype, reason: str) -> None:
    q, v = (torch.zeros(1, 1, 2, count, dtype=dtype) for count in (size, value_size))
    found = _cuda_limits(describe(q, q, v))
    assert found is not None
    assert reason in found
