"""Every case of every operator holds at any sizes that the shape flags of ``rl-kernels check`` allow."""

import json
import math
import zlib

import pytest
import torch

from rl_kernels.core import kernel_registry
from rl_kernels.core.testing import Draw, spec_of
from rl_kernels.lab.check import cli
from rl_kernels.lab.check.candidate import backend_candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import CaseId, Check

DRAWN, RUN = 10**6, 30_000
"""Product of the sizes of a case up to which its inputs are drawn, and its relations run."""


def sized(name):
    """Yield sizes of an operator: each flag at 1, all at 1, 2 and 3, and each larger than in most cases."""
    flags = spec_of(kernel_registry.load(name)).size_names()
    yield from ({flag: count} for flag in flags for count in (1, 40))
    yield from (dict.fromkeys(flags, count) for count in (1, 2, 3))


def resized(name, sizes):
    """Yield the cases of an operator at other sizes, without those that the flags leave as they are."""
    for case in spec_of(kernel_registry.load(name)).cases:
        found = case.resized({flag: count for flag, count in sizes.items() if flag in case.sizes})
        if found.sizes != case.sizes:
            yield found


def identify(value):
    return value if isinstance(value, str) else "-".join(f"{flag}={count}" for flag, count in value.items())


EVERY = [(name, sizes) for name in kernel_registry.names() for sizes in sized(name)]
SMALL = [(name, sizes) for name, sizes in EVERY if 40 not in sizes.values()]


@pytest.mark.parametrize(("name", "sizes"), EVERY, ids=identify)
def test_every_case_is_drawn(name, sizes):
    operator = kernel_registry.load(name)
    spec = spec_of(operator)
    for case in resized(name, sizes):
        if math.prod(case.sizes.values()) <= DRAWN:
            assert spec.inputs(case, Draw(torch.float32)), case


@pytest.mark.parametrize(("name", "sizes"), SMALL, ids=identify)
def test_native_is_accurate(name, sizes):
    operator = kernel_registry.load(name)
    # The fence of FP32 is the narrowest of log-probabilities, that of FP16 of sums whose terms were rounded before.
    dtype = "fp16" if name == "linear_logp" else "fp32"
    setting = Setting(dtype, torch.device("cpu"), "cpu")
    candidate = backend_candidate(operator, "native", "native", "cpu")
    for case in resized(name, sizes):
        if case.relations and "accuracy" not in case.relations:
            continue
        if case.gpu or case.suite == "full" or math.prod(case.sizes.values()) > RUN:
            continue
        # Of those made in numbers, which have sizes of 1 themselves, a few, other ones at other sizes.
        if case.relations and zlib.crc32(f"{case.name} {sizes}".encode()) % 12:
            continue
        cell = Cell(candidate, spec_of(operator), case, setting)
        checks = [record for relation in ("accuracy", "gradients") for record in check_relation(cell, relation)]
        checks = [check for check in checks if isinstance(check, Check)]
        assert checks, case
        assert not [f"{each.case} {each.item}: {each.comparison.message}" for each in checks if not each.passed]


COMMANDS = (
    "--op logp --candidate pytorch --device cpu --dtype fp32 --batch 1 --seq 2 --vocab 17 --relation accuracy hygiene",
    "--op logp --candidate native --device cpu --dtype bf16 --arch-key sm90 --batch 1 --seq 1 --vocab 4096 "
    "--relation accuracy invariance robustness",
    "--op logp --candidate native --device cpu --batch 1 --seq 1 --vocab 1 --relation accuracy invariance hygiene",
    "--op linear_logp --candidate native --device cpu --check-grad --relation accuracy --hidden 1",
    "--op linear_logp --candidate native --device cpu --relation accuracy --vocab 1 --dtype bf16 fp16",
    "--op det_gemm --candidate native --device cpu --relation accuracy --k-dim 1 --dtype fp32 bf16 fp16",
    "--op det_gemm --candidate pytorch --device cpu --check-grad --relation repeatability --m-dim 1 --n-dim 1 "
    "--k-dim 1",
    "--op grpo_loss --candidate native --device cpu --relation accuracy gradients robustness --prompts 1 --samples 1 "
    "--completion 1",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines_end_in_a_verdict(command, capsys):
    assert cli.main([*command.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["passed"] is True
    assert report["pass_rate"] == 1
    operator = kernel_registry.load(command.split()[1]).name
    assert {CaseId.parse(each["case_id"]).operator for of in report["candidates"] for each in of["outputs"]} == {
        operator
    }


def test_a_command_line_without_json_ends_in_one_too(capsys):
    assert cli.main([*COMMANDS[0].split(), "-v"]) == 0
    assert "no-distribution" in capsys.readouterr().out
    assert cli.main([*COMMANDS[0].split(), "--list"]) == 0
    assert {CaseId.parse(line).operator for line in capsys.readouterr().out.splitlines()} == {"fused_logp"}
