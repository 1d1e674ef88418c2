"""The page on hardware names the backends that calls take."""

import re
from pathlib import Path

import pytest
import torch

from rl_kernels.core.commands.explain import verdicts_of
from rl_kernels.core.cuda import where
from rl_kernels.core.operator import Call
from rl_kernels.core.triton_lib import launch

PAGE = Path(__file__).parents[1] / "docs" / "hardware.md"


def named(cell: str, operators: list[str]) -> dict[str, str]:
    """Return the backend of each operator by a cell such as "`a` for `x` and `y`, `b` for the others"."""
    found: dict[str, str] = {}
    for part in re.split(r", (?=`[^`]+` for)", cell):
        backend, which = part.split(" for ")
        names = re.findall(r"`(\w+)`", which) or [name for name in operators if name not in found]
        found |= dict.fromkeys(names, backend.strip("`"))
    return found


def rows() -> dict[str, str]:
    """Return the cell of backends for each architecture of the table."""
    text = PAGE.read_text(encoding="utf-8").partition("## Which backend a call takes")[2].partition("## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    first = dict(zip((row[0].partition(" (")[0] for row in table), (row[1] for row in table), strict=True))
    found = {}
    for device, cell, *_ in table:
        cell = first[cell.removeprefix("as ")] if cell.startswith("as ") else cell
        found |= dict.fromkeys((arch.replace("_", "") for arch in re.findall(r"\((sm_\d+|gfx\d+)\)", device)), cell)
    return found


def test_the_table_is_of_all_gpus_that_kernels_are_compiled_for():
    assert list(rows()) == ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("arch", "cell"), rows().items(), ids=rows())
def test_calls_take_the_backends_of_the_table(monkeypatch, arch, cell, dtype):
    """With all software that a backend needs."""
    monkeypatch.setattr(where, "_missing", {})
    monkeypatch.setattr(where, "_why_missing", lambda *_: None)
    monkeypatch.setattr(launch, "INSTALLED", True)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    chosen = {
        name: next(each.backend for each in verdicts if each.chosen)
        for name, verdicts in verdicts_of(Call(torch.device("cuda", 0), dtype, arch)).items()
    }
    assert chosen == named(cell, list(chosen))
