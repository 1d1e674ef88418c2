"""The host side of gradients of ``cuda-sm90`` without a GPU: PyTorch stands for its kernels; planted bugs show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import poisoned_empty
from rl_kernels.core.testing.launches import Launch, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.triton_launches import TritonLaunch, TritonRecorder
from rl_kernels.gated_delta.backends import native
from rl_kernels.gated_delta.inputs import Inputs

sys.path.insert(0, str(Path(__file__).parent))
from test_cuda_prefill import CALLS, FAILURES, MODULES, PROCESSORS, SIZE, StandIns, integers, operands, run

BACKWARD = "rl_kernels.gated_delta.backends.cuda_sm90.backward"
PLANTED = ("rl_kernels.gated_delta.triton_lib.backward", MODULES[0], BACKWARD, MODULES[1])
BUGS = (
    Bug("strides of q for k", "self.strides = q_strides, k_strides", "self.strides = q_strides, q_strides"),
    Bug("the gradient is not copied", "readable(grad, dense)", "grad"),
    Bug("gradient at an odd address is not copied", "and not grad.data_ptr() % ALIGNED", ""),
    Bug("padding is not cleared", "is_padded = rest is None or call.start is not None", "is_padded = rest is None"),
    Bug("the next tile's columns", "(CHUNK, WIDTH), swizzle", "(CHUNK, SIZE), swizzle"),
    Bug("a ring larger than its memory", "FEW * (whole(", "(whole("),
    Bug("no room for a state beside the ring", " + 3 * parts * BOX", ""),
    Bug("gradients of states swapped", "items, grad_state, initial,", "items, initial, grad_state,"),
    Bug("the initial state is left out", "units, items, inputs.initial_state,", "units, items, None,"),
    Bug("residuals for states", "(states, residuals, dstates))", "(residuals, states, dstates))"),
    Bug("sums of half of the warps", "kept = SIZE // 16", "kept = SIZE // 32"),
    Bug("numbers are read with strides", "None if x is None else x.contiguous()", "x"),
)
Plant = Callable[[], AbstractContextManager[None]]


class GradientStandIns(StandIns):
    """PyTorch in place of all kernels; ``reverse`` computes what the others read, and those after it write it."""

    def prepare(self, launch: Launch) -> None:
        """Read the operands, and check the sizes of what gradients read."""
        super().prepare(launch)
        assert launch.constants["GRADIENTS"]
        self.sizes = slots, key_heads, heads = (
            self.slots(launch, launch["bounds"]),
            launch["key_heads"],
            launch["heads"],
        )
        for name, shape in (("unit_q", key_heads), ("unit_k", key_heads), ("sums", heads), ("inverses", heads)):
            assert launch[name].shape[:3] == (launch[name].shape[0], shape, 64)
            assert launch[name].shape[0] >= slots
        assert launch["unit_q"].shape[3] == launch["unit_k"].shape[3] == SIZE
        assert launch["inverses"].shape[3] == 64
        self.read["rows"] = [launch[name] for name in ("unit_q", "unit_k", "sums")]
        self.read["inverses"] = launch["inverses"]

    def check_pass(self, launch: Launch, stage: int, boxes: int) -> None:
        """Check what all passes over chunks have alike."""
        parts = launch.constants["PARTS"]
        heads, sequences = launch["heads"], launch["sequences"]
        assert parts == (1 if 2 * sequences * heads <= PROCESSORS else 2)
        assert launch.grid == (sequences, heads, 2 // parts)
        assert launch.block == (160 if parts == 1 else 384)
        whole = -(-(stage + 8192 * parts + 25088) // 1024) * 1024
        of_parts = boxes * 8192 * parts
        assert launch.shared >= launch.constants["STAGES"] * (whole + of_parts) + 1024
        assert all(launch[name] is x for name, x in zip(("units", "items"), self.read["same"], strict=False))

    def tile(self, launch: Launch, name: str, rows: int) -> int:
        """Check the map of tiles ``[slots, Hv, rows, 128]``, and return the address."""
        described = launch[name]
        assert (described.box, described.swizzle) == ((64, 64), 128)
        assert described.tensor.shape[0] >= self.sizes[0] * self.sizes[2] * rows
        assert described.tensor.shape[0] % (self.sizes[2] * rows) == 0
        address: int = described.tensor.data_ptr()
        return address

    def replay(self, launch: Launch) -> None:
        """Read v and the initial state."""
        # Boxes beside the ring count once, those of a stage for each.
        self.check_pass(launch, 8192, 0)
        ring = launch.constants["STAGES"] * -(-(8192 + 8192 * launch.constants["PARTS"] + 25088) // 1024) * 1024
        assert launch.shared >= ring + 3 * 8192 * launch.constants["PARTS"] + 1024
        assert launch["v_map"].box == (1, 64, 1, 64)
        self.read |= {"v": launch["v_map"].tensor, "initial": launch["initial"]}
        self.read |= {"states": self.tile(launch, "states_map", SIZE), "x": self.tile(launch, "residuals_map", 64)}
        assert launch["states_map"].tensor.shape[0] == 2 * launch["residuals_map"].tensor.shape[0]

    def reverse(self, launch: Launch) -> None:
        """Compute all gradients by the native backend."""
        self.check_pass(launch, 32768, 2)
        assert launch["grad_map"].box == (1, 64, 1, 64)
        assert self.tile(launch, "states_map", SIZE) == self.read["states"]
        assert launch["kept"].shape[1:] == (launch["heads"], 8)
        q, k, g, beta = self.read["operands"]
        bounds, starts = integers(launch, "bounds"), integers(launch, "starts")
        call = (q, k, self.read["v"], g, beta, self.read["initial"], bounds, starts, launch["scale"])
        *results, initial = native.backward(
            *call, self.read["normalize"], launch["grad_map"].tensor, launch["grad_state"], True
        )
        self.read |= {"dstates": self.tile(launch, "dstates_map", SIZE), "kept": launch["kept"], "dv": launch["dv"]}
        self.read |= {"grad": launch["grad_map"].tensor, "results": results, "starts": starts}
        self.write(launch["dv"], 2)
        if launch["initial"] is not None:
            launch["initial"].copy_(initial)

    def write(self, out: torch.Tensor, number: int) -> None:
        """Write the gradient of an operand, where there are tokens."""
        starts = self.read["starts"]
        for row, start in enumerate([0] * len(out) if starts is None else starts.tolist()):
            out[row, start:] = self.read["results"][number][row, start:]

    def of_chunks(self, launch: TritonLaunch) -> None:
        """Write what a kernel of all chunks at once does."""
        read, (slots, key_heads, heads) = self.read, self.sizes
        assert launch.grid[0] >= slots
        assert launch.grid[1] == (heads if launch.name == "systems" else key_heads)
        assert (launch["HK"], launch["HV"], launch["D"], launch["DV"]) == (key_heads, heads, SIZE, SIZE)
        names = ("UNIT_Q", "UNIT_K", "SUMS")
        assert all(launch[name] is x for name, x in zip(names, read["rows"], strict=True))
        at = {"STATES": "states", "DSTATES": "dstates", "RESIDUALS": "x"}
        same = {"INVERSE": "inverses", "KEPT": "kept", "GRAD": "grad", "DVALUES": "dv"}
        for name, value in launch.arguments.items():
            assert name not in at or value.data_ptr() == read[at[name]], name
            assert name not in same or value is read[same[name]], name
        if launch.name == "systems":
            self.write(launch["DBETA"], 4)
        elif launch.name == "queries":
            self.check_strides(launch, "q")
            self.write(launch["DQ"], 0)
        else:
            self.check_strides(launch, "k")
            assert launch["SIZE"] == launch["KEPT"].shape[2]
            self.write(launch["DK"], 1)
            self.write(launch["DG"], 3)

    def check_strides(self, launch: TritonLaunch, name: str) -> None:
        """Check how q or k is read, and whether it is normalized."""
        x, strides = launch[name.upper()], [launch[f"{name}_{dim}"] for dim in ("batch", "token", "head")]
        torch.testing.assert_close(
            x.as_strided(x.shape, (*strides, 1), x.storage_offset()), self.read["operands"][name == "k"], rtol=0, atol=0
        )
        assert launch["NORMALIZE"] == self.read["normalize"]


def check_call(stand_ins: GradientStandIns, shape: tuple[Any, ...], choices: dict[str, Any], plant: Plant) -> None:
    torch.manual_seed(0)
    call = operands(*shape)
    options = (choices.get("cu_seqlens"), choices.get("start"), 0.1, choices.get("normalize", True))
    state_shape = Inputs(*call, None, *options).state_shape
    initial, grad_state = torch.randn(state_shape).mT, torch.randn(state_shape)
    grad = torch.randn(call[2].shape).to(shape[4])
    shifted = torch.empty(grad.numel() + 1, dtype=grad.dtype)[1:].view(grad.shape).copy_(grad)
    kernels = {name: getattr(stand_ins, name) for name in ("prepare", "replay", "reverse")}
    others = TritonRecorder(dict.fromkeys(("systems", "queries", "keys"), stand_ins.of_chunks))
    recorder = Recorder(kernels, processors=PROCESSORS)
    calls = (
        (initial, grad, grad_state, True),
        (initial, grad.transpose(1, 2).contiguous().transpose(1, 2), None, False),
        (None, shifted, grad_state, True),
    )
    for state, *rest in calls:
        arguments = (*call, state, *options, *rest)
        with plant(), others.pretended(), recorder.watching(*MODULES, BACKWARD), poisoned_empty():
            got = run("backward", arguments)
        for value, expected in zip(got, native.backward(*arguments), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
    assert len(recorder.launches) == len(others.launches) == 3 * len(calls)


def check_all(plant: Plant = nullcontext) -> None:
    for shape, choices in CALLS:
        check_call(GradientStandIns(), shape, choices, plant)


def test_launches_match_the_shapes() -> None:
    check_all()


@pytest.mark.parametrize("needs_state", [False, True])
def test_no_tokens(needs_state: bool) -> None:
    call = operands(2, 0, 1, 2, torch.bfloat16, "plain")
    options, grad_state = (None, None, 0.1, True), torch.randn(2, 2, SIZE, SIZE)
    *rest, initial = run("backward", (*call, None, *options, call[2], grad_state, needs_state))
    assert [x.shape for x in rest] == [x.shape for x in call]
    assert torch.equal(initial, grad_state if needs_state else grad_state.new_empty(0))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_host_bug_fails(bug: Bug) -> None:
    with pytest.raises(FAILURES):
        check_all(partial(planted, PLANTED, bug))
