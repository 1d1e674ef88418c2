"""What `rl-kernels compile --backend triton` compiles: every kernel that a backend launches."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core import registry
from rl_kernels.core.testing.triton_launches import TritonLaunch, TritonRecorder

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = {
    ".".join(file.parent.relative_to(ROOT).parts[4:]).replace(".backends.triton", ""): file.parent
    for file in ROOT.glob("packages/*/src/rl_kernels/*/backends/triton/**/ahead.py")
}
"""Folders by the name of the package, with the name of the folder for a second operator: ``gated_delta.conv``."""
SHARED = ROOT / "shared/core/src/rl_kernels/core/triton_lib"
PEERS = {"peers.py", "peer_kernels.py"}
"""Sums over GPUs of one node: no operator's backend."""
LAUNCHES, METHODS = {"launch", "Launch", "of_chunks"}, {"over_chunks"}
DTYPES = (torch.bfloat16, torch.float32)


def launched(folder: Path) -> Iterator[str]:
    """Yield the names of the kernels that modules launch: ``kernel[grid](...)`` and ``launch(kernel, ...)``."""
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            kernel = node.func.value if isinstance(node.func, ast.Subscript) else None
            if getattr(node.func, "id", None) in LAUNCHES or getattr(node.func, "attr", None) in METHODS:
                kernel = node.args[0]
            # A function that launches what it is called with.
            if kernel is not None and getattr(kernel, "id", None) != "kernel":
                yield kernel.attr if isinstance(kernel, ast.Attribute) else kernel.id


@contextmanager
def pretended(arch: str) -> Iterator[TritonRecorder]:
    with TritonRecorder(arch=arch).pretended() as recorder:
        schedule = importlib.import_module("rl_kernels.core.triton_lib.schedule")
        with patch.dict(schedule.processors_of_devices, meta=132):
            yield recorder


def module_of(operator: str) -> str:
    package, _, folder = operator.partition(".")
    return f"rl_kernels.{package}.backends.triton" + (f".{folder}" if folder else "")


def run(operator: str) -> None:
    calls = importlib.import_module(f"{module_of(operator)}.ahead").calls
    for dtype in DTYPES:
        for call in calls(dtype):
            call()


def test_every_triton_backend_has_calls() -> None:
    operators = [registry.kernel_registry.load(name) for name in registry.kernel_registry.names()]
    modules = {each.backend("triton").module for each in operators if any(b.name == "triton" for b in each.backends)}
    assert modules == {f"{module_of(name)}.backend" for name in BACKENDS}


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
@pytest.mark.parametrize("operator", BACKENDS)
def test_every_kernel_is_compiled(operator: str, arch: str) -> None:
    with pretended(arch) as recorder:
        run(operator)
    found = {each.name for each in recorder.launches}
    # What a package's backends share is of its first operator.
    shared = () if "." in operator else launched(_package(operator) / "triton_lib")
    wanted = {*launched(BACKENDS[operator]), *shared}
    assert wanted <= found
    # Nothing but the kernels of core is launched besides.
    of_core = {name for file in SHARED.glob("*.py") if file.name not in PEERS for name in _kernels_of(file)}
    assert found - wanted <= of_core


def options(each: TritonLaunch, *names: str) -> tuple[int, ...]:
    return *(each[name] for name in names), each.options["num_warps"], each.options["num_stages"]


@pytest.mark.parametrize("arch", ["sm80", "gfx942"])
def test_tiles_follow_no_rows_where_that_was_not_shown_to_change_no_bit(arch: str) -> None:
    """Elsewhere than on Hopper a dtype has one tile, of 16 rows and of 4096."""
    for dtype in DTYPES:
        with pretended(arch) as recorder:
            for call in importlib.import_module("rl_kernels.linear_logp.backends.triton.ahead").calls(dtype):
                call()
        # Logits that were kept are not recomputed.
        again = [each for each in recorder.launches if each.name == "states" or not each.arguments.get("KEPT", True)]
        assert len({options(each, "BLOCK_M", "BLOCK_K") for each in again}) == 1


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_every_schedule_of_a_product_is_compiled(arch: str) -> None:
    with pretended(arch) as recorder:
        run("det_gemm")
        schedule = importlib.import_module("rl_kernels.core.triton_lib.schedule")
        wanted = {
            (cut.rows, cut.columns, cut.inner, cut.warps, cut.stages)
            for dtype in DTYPES
            for cut in schedule.schedules(dtype, torch.device("meta"))
        }
    assert wanted <= {options(each, "BLOCK_M", "BLOCK_N", "BLOCK_K") for each in recorder.launches}


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_every_tile_of_attention_is_compiled(arch: str) -> None:
    with pretended(arch) as recorder:
        run("attention")
        schedule = importlib.import_module("rl_kernels.attention.backends.triton.schedule")
        wanted = set()
        for dtype, wide, group in product(DTYPES, (8, 64, 72, 128, 136, 256), (1, 4, 7)):
            fast = arch == "sm90" and dtype in schedule.HALF
            for rows, in_boxes in product((1, 16, 17, 4096), (False, True)):
                tile = schedule.tile_of(dtype, wide, fast, rows, in_boxes)
                wanted.add(("attend", tile.rows, tile.warps, tile.stages))
            tile = schedule.tile_of_queries(dtype, wide, fast)
            wanted.add(("of_queries", tile.rows, tile.warps, tile.stages))
            keys = schedule.tile_of_keys(dtype, wide, fast, group)
            wanted.add(("of_keys", keys.rows, keys.warps, keys.stages))
    tiles = [each for each in recorder.launches if each.name in {name for name, *_ in wanted}]
    assert wanted == {(each.name, *options(each, "ROWS")) for each in tiles}


def _package(operator: str) -> Path:
    (folder,) = ROOT.glob(f"packages/*/src/rl_kernels/{operator.partition('.')[0]}")
    return folder


def _kernels_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
            yield node.name
