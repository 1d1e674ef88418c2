"""The tolerance contract and the operators fit: every comparison has a row, and its value can be traced."""

import json
from itertools import product

import pytest
import torch
from forked import imported

from rl_kernels.core import kernel_registry
from rl_kernels.core.contract import DIRECTIONS, DTYPES, RELATIONS, contract, parse
from rl_kernels.core.testing import Draw, function_of, spec_of
from rl_kernels.lab.check.candidate import reference_candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.guard import named
from rl_kernels.lab.check.result import CaseId

calibrate = imported("calibrate")
OPERATORS = kernel_registry.names()
USED = {op_class for name in OPERATORS for op_class in spec_of(kernel_registry.load(name)).classes.values()}
MEASURED = {row: found.measured for row, found in contract().rows.items() if found.measured}
ARITHMETIC = ("eager", "same_dtype")
OUTSIDE = {
    ("accuracy", "logprob", "fp32", "gradient"),
    ("accuracy", "reduction", "bf16", "gradient"),
    ("accuracy", "reduction", "fp16", "gradient"),
}
"""Rows that plain PyTorch does not keep: it sums over a vocabulary of 151,936 in one go, with an absolute fence; and
rounds the terms of a norm's weight gradient to 16 bits before it sums them."""


def cell(errors):
    """Return the cell that a measurement names."""
    named_case = CaseId.parse(errors.case)
    operator = kernel_registry.load(named_case.operator)
    spec = spec_of(operator)
    setting = Setting(named_case.dtype, torch.device("cpu"), "cpu", errors.seed)
    return Cell(reference_candidate(operator, spec), spec, spec.case(named_case.case), setting)


def test_all_operators_are_here():
    assert {"det_gemm", "fused_logp", "grpo_loss", "linear_logp"} <= set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_class_has_every_row(name):
    classes = set(spec_of(kernel_registry.load(name)).classes.values())
    for row in product(RELATIONS, classes, DTYPES, DIRECTIONS, contract().archs):
        contract().tolerance(*row)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_result_has_a_class(name):
    operator = kernel_registry.load(name)
    spec = spec_of(operator)
    for case in spec.cases:
        if case.suite == "full" or case.gpu:
            continue
        inputs = spec.inputs(case, Draw(torch.float32))
        results = named(function_of(operator, case.function)(**inputs), spec.output)
        gradients = {f"gradient:{argument}" for argument in spec.differentiable if argument in inputs}
        assert results.keys() | gradients <= spec.classes.keys(), case.name


@pytest.mark.parametrize("name", OPERATORS)
def test_names_are_unique_and_backends_promise_something_everywhere_they_run(name):
    operator = kernel_registry.load(name)
    spec = spec_of(operator)
    for names in ([case.name for case in spec.cases], [call.name for call in spec.illegal]):
        assert len(names) == len(set(names)) > 0
    for backend in operator.backends:
        assert backend.promises
        assert all("repeatable" in promises for promises in backend.promises.values())


def test_what_is_measured_are_the_named_cases():
    cases = [found.case for found in calibrate.cells("full", [123])]
    assert cases
    assert not [case.name for case in cases if case.relations or case.dtype]


def test_what_is_measured_is_the_accuracy_of_the_classes_in_use():
    assert set(MEASURED) == set(product(["accuracy"], USED, DTYPES, DIRECTIONS))
    assert contract().calibration.device == "cpu"


def test_a_class_that_no_operator_uses_says_so():
    for (_, op_class, dtype, _), row in contract().rows.items():
        if dtype not in DTYPES:
            continue
        assert ("No operator uses this class" in row.provenance) == (op_class not in USED)


def test_plain_pytorch_keeps_inside_every_row_but_the_known():
    assert {row for row, measured in MEASURED.items() if measured.eager.share >= 1} == OUTSIDE
    assert {row for row, measured in MEASURED.items() if measured.eager.inside < measured.results} == OUTSIDE


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("row", MEASURED, ids="-".join)
def test_a_measurement_names_a_result_that_exists_and_counts_for_its_row(row, arithmetic):
    errors = getattr(MEASURED[row], arithmetic)
    found = cell(errors)
    assert errors.seed in contract().calibration.seeds
    assert found.spec.classes[errors.item] == row[1]
    assert errors.item.startswith("gradient:") == (row[3] == "gradient")
    relation = "gradients" if row[3] == "gradient" else "accuracy"
    assert errors.case == found.case_id(relation)


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_a_measurement_can_be_repeated(arithmetic):
    row = ("accuracy", "logprob", "bf16", "forward")
    written = getattr(MEASURED[row], arithmetic)
    again = {
        (sample.row, sample.arithmetic, sample.errors.item): sample.errors
        for sample in calibrate.measure(cell(written))
    }[row, arithmetic, written.item]
    assert again.share == pytest.approx(written.share, rel=0.5)
    assert again.inside == (written.share <= 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_measurement_counts_for_the_row_that_the_checker_holds_it_to(dtype):
    operator = kernel_registry.load("fused_logp")
    spec = spec_of(operator)
    setting = Setting(dtype, torch.device("cpu"), "cpu")
    half = Cell(reference_candidate(operator, spec), spec, spec.case("half-output"), setting)
    rows = {sample.errors.item: sample.row for sample in calibrate.measure(half)}
    assert rows["logp"] == ("accuracy", "logprob", "bf16", "forward")
    assert rows["gradient:logits"] == ("accuracy", "logprob", dtype, "gradient")
    for item, kind in (("logp", torch.bfloat16), ("gradient:logits", DTYPES[dtype])):
        assert contract().tolerance(*rows[item], "cpu") is half.tolerance("accuracy", item, kind)


def test_the_file_has_the_form_that_calibrate_writes():
    text = calibrate.FILE.read_text("utf-8")
    assert calibrate.written(json.loads(text), MEASURED, contract().calibration) == text


def test_calibrate_writes_measurements_and_nothing_else(monkeypatch, tmp_path, capsys):
    before = calibrate.FILE.read_text("utf-8")
    file = tmp_path / "contract.json"
    file.write_text(before, encoding="utf-8")
    few = [cell(MEASURED["accuracy", "logprob", "fp16", "forward"].eager)]
    rows = [sample.row for sample in calibrate.measure(few[0]) if sample.arithmetic == "eager"]
    monkeypatch.setattr(calibrate, "FILE", file)
    monkeypatch.setattr(calibrate, "cells", lambda suite, seeds: few)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    calibrate.main(["--seeds", "2"])
    assert "logprob fp16 forward" in capsys.readouterr().out
    assert file.read_text("utf-8") == before

    calibrate.main(["--seeds", "2", "--suite", "quick", "--write"])
    found = parse(json.loads(file.read_text("utf-8")))
    assert found.calibration == (torch.__version__, "cpu", "quick", (123, 124))
    # What an earlier run left in the other rows is gone: it was measured with something else.
    assert {row for row, value in found.rows.items() if value.measured} == set(rows)
    assert all(found.rows[row].measured.results == rows.count(row) for row in rows)
    assert {row: value._replace(measured=None) for row, value in found.rows.items()} == {
        row: value._replace(measured=None) for row, value in contract().rows.items()
    }
    assert (found.version, found.archs) == (contract().version, contract().archs)


def test_calibrate_needs_an_operator(monkeypatch, capsys):
    monkeypatch.setattr(calibrate.kernel_registry, "names", tuple)
    with pytest.raises(SystemExit, match="2"):
        calibrate.main(["--write"])
    assert "no operator is installed" in capsys.readouterr().err


def test_same_dtype_takes_no_cast_to_a_wider_dtype():
    x = torch.ones(3, dtype=torch.bfloat16)
    wider = (
        lambda: x.float(),
        lambda: x.double(),
        lambda: x.to(torch.float32),
        lambda: x.to("cpu", torch.float64),
        lambda: x.to(dtype=torch.float32),
        lambda: torch.softmax(x, 0, dtype=torch.float32),
        lambda: x.sum(dtype=torch.float32),
    )
    assert all(cast().dtype != torch.bfloat16 for cast in wider)
    with calibrate.SameDtype():
        assert all(cast().dtype == torch.bfloat16 for cast in wider)
        assert x.to(torch.int64).dtype == torch.int64
        assert torch.ones(3).to(torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(3, dtype=torch.int64).float().dtype == torch.float32


def test_an_overflow_counts_as_the_largest_number():
    row = ("accuracy", "logprob", "fp16", "forward")
    value = torch.tensor([torch.inf, torch.nan, torch.inf], dtype=torch.float16)
    gold = torch.tensor([0.0, 1.0, torch.inf], dtype=torch.float64)
    errors = calibrate._errors(cell(MEASURED[row].eager), "entropy", value, gold, row)
    assert errors.max_abs == torch.finfo(torch.float16).max
    assert errors.inside == 0
