"""The host side of ``cuda-sm90`` without a GPU: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.launches import Launch, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonRecorder
from rl_kernels.moe.activations import NAMES, activate
from rl_kernels.moe.reference import split

sys.path.insert(0, str(Path(__file__).parent))
from experts_launches import STAND_INS, check

PACKAGE = "rl_kernels.moe.backends.cuda_sm90"
MODULES = tuple(f"{PACKAGE}.{name}" for name in ("products", "token", "gradient", "backend"))
PROCESSORS = 5
DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
BUGS = (
    Bug("tiles of few columns are left out", "blocks = min(tiles * -(-n", "blocks = min(tiles * (n"),
    Bug("halves of gate and up overlap", "n // parts * row, row, 1)", "row, row, 1)"),
    Bug(
        "columns of the transpose for those of a row", "(expert, n // parts, column, 1)", "(expert, n // parts, row, 1)"
    ),
    Bug("a weight that TMA cannot read is not copied", "readable(b, self._fits)", "readable(b, True)"),
    Bug("an operand at an odd address is not copied", "readable(a, not a.data_ptr() % ALIGNED)", "readable(a, True)"),
    Bug("stages beyond the room", "(SHARED - self._fixed) // self._stage", "1 + (SHARED - self._fixed) // self._stage"),
    Bug("buffer's strides left out", "if buffer is None else buffer.stride()", "if True else buffer.stride()"),
    Bug("a token's rows do not fit", "RING.size + MOST * _row(k)\n", "RING.size\n"),
    Bug("a token's routes are sorted", "is_sorted=False)", "is_sorted=True)"),
    Bug("a token's activation is left out", "(b, ids, True, activation)", "(b, ids, True)"),
    Bug("rows of the wrong operand are tokens", "left=left_gathered,", "left=right_gathered,"),
)
FAILURES = (AssertionError, RuntimeError, ValueError, IndexError)
Plant = Callable[[], AbstractContextManager[None]]


def experts(launch: Launch) -> None:
    """Compute the products of all tiles, and check the arguments against the shapes."""
    constants, count, columns, inner = launch.constants, launch["experts"], launch["columns"], launch["inner"]
    rows, width = 128, constants["TILE_N"]
    parts = 2 if constants["PAIR"] == 1 else 1
    across = -(-columns // (width // 2 if constants["PAIR"] else width))
    assert launch.grid == (min(launch["size"] * across, PROCESSORS), 1, 1)
    assert launch.block == 128 * (rows // 64 + 1)
    assert launch.shared >= constants["STAGES"] * (rows + width) * 128 + 2 * rows * 128 + 1024
    assert constants["STAGES"] >= 3
    described = launch["map_b"]
    assert described.swizzle == 128
    if constants["B_MAJOR"]:
        assert described.box == (1, 1, 64, 64)
        b = described.tensor.mT
    else:
        assert described.box == (1, parts, width // parts, 64)
        b = described.tensor
    of_b = 2 * columns if constants["PAIR"] else columns
    assert b.shape == (count, parts, of_b // parts, inner)
    b = b.reshape(count, of_b, inner)
    routes, tiles = launch["routes"], launch["tiles"].view(3, launch["size"])
    if constants["GATHERED"]:
        assert not launch["a"].data_ptr() % 16
        left = launch["a"]
    else:
        assert launch["map_a"].box == (rows, 64)
        left = launch["map_a"].tensor
    assert left.shape[1] == inner
    assert left.is_contiguous()
    for expert, first, end in tiles.t().tolist():
        if expert == count:
            break
        at = torch.arange(first, min(first + rows, end))
        a = left[routes[at] // launch["slots"] if constants["GATHERED"] else at]
        sums = a.float() @ b[expert].float().t()
        if launch["bias"] is not None:
            assert launch["bias"].shape == (count, of_b)
            sums += launch["bias"][expert].float()
        target = routes[at] if constants["SCATTERED"] else at
        assert launch["out"].dtype == DTYPES[constants["OUT"]]
        assert launch["out"].shape[1] == columns
        if constants["PAIR"]:
            sums = sums.to(left.dtype)
            if constants["KEEPS"]:
                launch["z"][target] = sums
            sums = activate(*split(sums, constants["PAIR"] == 2), NAMES[constants["ACTIVATION"]])
        launch["out"][target] = sums.to(launch["out"].dtype)


def gradient(launch: Launch) -> None:
    """Compute the chains of all experts, and check the arguments against the shapes."""
    constants, count, n, k = launch.constants, launch["experts"], launch["n"], launch["k"]
    width = constants["TILE_N"]
    assert launch.grid == (min(count * -(-n // 128) * -(-k // width), PROCESSORS), 1, 1)
    assert launch.shared >= constants["STAGES"] * (128 + width) * 128 + 2 * 128 * 128 + 1024
    assert launch["map"].box == (64, 64)
    assert launch["map"].tensor.shape[1] == (k if constants["LEFT"] else n)
    bounds, routes, out = launch["bounds"].tolist(), launch["routes"], launch["out"]
    if constants["CONTINUES"]:
        strides = (launch["out_expert"], launch["out_row"], launch["out_column"])
        out = out.as_strided((count, n, k), strides, out.storage_offset())
    assert out.shape == (count, n, k)
    for expert in range(count):
        at = torch.arange(bounds[expert], bounds[expert + 1])
        tokens = routes[at] // launch["slots"]
        left, right = launch["left"], launch["right"]
        left = left[tokens] if constants["LEFT"] else left[at]
        right = right[at] if constants["LEFT"] else right[tokens]
        out[expert] = (left.double().t() @ right.double() + (out[expert] if constants["CONTINUES"] else 0)).to(
            out.dtype
        )


def token(launch: Launch) -> None:
    """Compute the products of a token's routes, in FP64 as the stand-ins of Triton do."""
    constants, count, columns, inner = launch.constants, launch["experts"], launch["columns"], launch["inner"]
    parts, ids, left, out = 1 + constants["PAIR"], launch["ids"], launch["a"], launch["out"]
    assert launch.grid == (PROCESSORS, 1, 1)
    assert launch.block == 32 * constants["WARPS"]
    ring = constants["WARPS"] * constants["STAGES"] * constants["BOXES"] * 16 * 128
    assert 1024 + ring + 8 * (-(-inner // 16) * 32 + 16) <= launch.shared <= 226 * 1024
    assert (launch["map"].box, launch["map"].swizzle) == ((1, parts, 16 // parts, 64), 128)
    assert launch["map"].tensor.shape == (count, parts, columns, inner)
    assert constants["WIDE_IDS"] == (ids.dtype == torch.int64)
    assert not left.data_ptr() % 16
    assert launch["routes"] == ids.numel() == len(out) <= 8
    b = launch["map"].tensor.reshape(count, parts * columns, inner)
    for route, expert in enumerate(ids.flatten().tolist()):
        if not 0 <= expert < count:
            continue
        sums = b[expert].double() @ left[0 if constants["PAIR"] else route].double()
        if launch["bias"] is not None:
            sums += launch["bias"][expert].double()
        sums = sums.to(out.dtype)
        out[route] = activate(*split(sums, False), NAMES[constants["ACTIVATION"]]) if constants["PAIR"] else sums


CALLS = (
    dict(tokens=900, width=64, inner=48, experts=8, slots=4),
    dict(tokens=700, width=32, inner=40, experts=3, slots=2, layout="transposed", biases=True, dtype=torch.float16),
    dict(tokens=300, width=128, inner=136, experts=4, slots=3, layout="transposed", interleaved=True),
    dict(tokens=400, width=72, inner=136, experts=4, slots=2, interleaved=True, activation="clamped_swiglu"),
    dict(tokens=400, width=40, inner=24, experts=2, slots=2, biases=True, activation="gelu_tanh", layout="odd"),
    dict(tokens=5, width=40, inner=24, experts=2, slots=2),
    dict(tokens=1, width=64, inner=136, experts=9, slots=4, biases=True, activation="gelu_tanh", dtype=torch.float16),
    dict(tokens=1, width=2048, inner=72, experts=3, slots=8, biases=True, activation="clamped_swiglu"),
    dict(tokens=1, width=64, inner=40, experts=3, slots=9),
)


def check_all(plant: Plant = nullcontext) -> None:
    recorder = Recorder({"experts": experts, "gradient": gradient, "token": token}, processors=PROCESSORS)
    for call in CALLS:
        with TritonRecorder(STAND_INS, arch="sm90").pretended(), plant(), recorder.watching(*MODULES), poisoned_empty():
            check(f"{PACKAGE}.backend", call)


def test_launches_match_the_shapes() -> None:
    check_all()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        check_all(partial(planted, MODULES, bug))
