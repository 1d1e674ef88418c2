import copy
from itertools import product

import pytest
import torch

from rl_kernels.core.contract import (
    ALL_DTYPES,
    CLASSES,
    DIRECTIONS,
    DTYPES,
    RELATIONS,
    MissingTolerance,
    contract,
    parse,
)

# (op_class, dtype) -> atol / rtol of the forward results, and of the gradients: the outer fence of accuracy.
ACCURACY = {
    ("elementwise", "fp32"): ((1e-5, 1e-5), (1e-5, 1e-5)),
    ("elementwise", "bf16"): ((2e-2, 1.6e-2), (2e-2, 1.6e-2)),
    ("elementwise", "fp16"): ((1e-3, 1e-3), (1e-3, 1e-3)),
    ("reduction", "fp32"): ((1e-4, 1e-4), (1e-4, 1e-4)),
    ("reduction", "bf16"): ((5e-2, 2e-2), (1e-1, 2e-2)),
    ("reduction", "fp16"): ((1e-3, 1e-3), (1e-3, 1e-3)),
    ("logprob", "fp32"): ((1e-5, 0), (1e-5, 0)),
    ("logprob", "bf16"): ((5e-2, 0), (5e-2, 2e-2)),
    ("logprob", "fp16"): ((5e-3, 0), (5e-3, 1e-3)),
    ("attention", "fp32"): ((1e-4, 1e-4), (1e-4, 1e-4)),
    ("attention", "bf16"): ((5e-2, 2e-2), (1e-1, 2e-2)),
    ("attention", "fp16"): ((5e-3, 1e-3), (1e-2, 1e-3)),
    **{(op_class, "fp64"): ((1e-10, 1e-10), (1e-10, 1e-10)) for op_class in CLASSES},
}
ROW = {"op_class": "logprob", "dtype": "fp32", "direction": "forward", "atol": 1, "rtol": 2, "provenance": "a test"}
ERRORS = {"max_abs": 0.5, "share": 0.25, "inside": 4, "case": "op/pytorch/fp32/accuracy/plain", "item": "y", "seed": 7}
MEASURED = {"results": 4, "eager": ERRORS, "same_dtype": {**ERRORS, "share": 3.0, "inside": 1}}
CALIBRATION = {"torch": "2.8.0", "device": "cpu", "suite": "full", "seeds": [7, 8]}
DOCUMENT = {"version": "7", "rows": [{"relation": "accuracy", **ROW}], "arch_overrides": {"cpu": [], "sm90": []}}


@pytest.mark.smoke
def test_fence_of_accuracy():
    for (op_class, dtype), direction in product(ACCURACY, DIRECTIONS):
        row = contract().tolerance("accuracy", op_class, dtype, direction, "cpu")
        assert (row.atol, row.rtol) == ACCURACY[op_class, dtype][direction == "gradient"], (op_class, dtype, direction)
        assert not row.bitwise
        assert str(row) == f"{row.atol:g}/{row.rtol:g}"


def test_rows_of_the_other_relations():
    rows = contract().rows
    assert rows.keys() == {*product(RELATIONS, CLASSES, ALL_DTYPES, DIRECTIONS)}
    assert {*product(CLASSES, ALL_DTYPES)} == {*ACCURACY}
    for key in product(CLASSES, ALL_DTYPES, DIRECTIONS):
        for relation in ("invariance", "repeatability"):
            row = contract().tolerance(relation, *key, "cpu")
            assert (row.bitwise, row.atol, row.rtol, str(row)) == (True, 0, 0, "bitwise")
        parity, accuracy = (rows[(relation, *key)] for relation in ("parity", "accuracy"))
        assert not parity.bitwise
        assert parity.atol <= accuracy.atol
        assert parity.rtol <= accuracy.rtol


def test_no_architecture_is_wider_and_every_row_says_where_its_value_comes_from():
    assert {"cpu", "sm80", "sm90", "sm100", "gfx942"} <= {*contract().archs}
    assert all(row.provenance.strip() for row in contract().rows.values())
    for rows in contract().overrides.values():
        for key, row in rows.items():
            assert row.provenance.strip()
            assert row.atol <= contract().rows[key].atol
            assert row.rtol <= contract().rows[key].rtol


def test_dtype_names_are_those_of_the_command_line():
    assert {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} == DTYPES


@pytest.mark.smoke
@pytest.mark.parametrize(
    "key",
    [
        ("hygiene", "logprob", "fp32", "forward"),
        ("accuracy", "matmul", "fp32", "forward"),
        ("accuracy", "logprob", "fp8", "forward"),
        ("accuracy", "logprob", "fp32", "backward"),
    ],
)
def test_a_missing_row_is_an_error(key):
    with pytest.raises(MissingTolerance, match="no row for " + " / ".join(key)):
        contract().tolerance(*key, "cpu")


def test_an_arch_overrides_its_own_rows_only():
    document = copy.deepcopy(DOCUMENT)
    document["arch_overrides"]["sm90"] = [{"relation": "accuracy", **ROW, "atol": 3}]
    parsed = parse(document)
    assert parsed.version == "7"
    assert parsed.tolerance("accuracy", "logprob", "fp32", "forward", "sm90").atol == 3
    assert parsed.tolerance("accuracy", "logprob", "fp32", "forward", "cpu").atol == 1
    with pytest.raises(LookupError, match="arch 'sm91' is not in the tolerance contract; known: cpu, sm80"):
        contract().tolerance("accuracy", "logprob", "fp32", "forward", "sm91")


def measured_document():
    document = copy.deepcopy({"calibration": CALIBRATION, **DOCUMENT})
    document["rows"][0]["measured"] = copy.deepcopy(MEASURED)
    return document


def test_what_was_measured_is_read_and_may_be_missing():
    parsed = parse(measured_document())
    assert parsed.calibration == ("2.8.0", "cpu", "full", (7, 8))
    measured = parsed.tolerance("accuracy", "logprob", "fp32", "forward", "cpu").measured
    assert (measured.results, measured.eager.share, measured.same_dtype.share) == (4, 0.25, 3.0)
    assert measured.eager.case == "op/pytorch/fp32/accuracy/plain"
    assert (measured.same_dtype.inside, measured.same_dtype.item, measured.same_dtype.seed) == (1, "y", 7)
    parsed = parse(DOCUMENT)
    assert parsed.calibration is None
    assert parsed.tolerance("accuracy", "logprob", "fp32", "forward", "cpu").measured is None


@pytest.mark.parametrize("place", ["rows", "arch_overrides"])
def test_duplicate_rows_are_refused(place):
    document = copy.deepcopy(DOCUMENT)
    rows = document["rows"] if place == "rows" else document["arch_overrides"]["cpu"]
    rows[:] = [{"relation": "accuracy", **ROW}] * 2
    with pytest.raises(ValueError, match="two rows for accuracy / logprob / fp32 / forward"):
        parse(document)


PARTS = {
    "document": (lambda document: document, ()),
    "row": (lambda document: document["rows"][0], ("relation", *ROW)),
    "calibration": (lambda document: document["calibration"], CALIBRATION),
    "measured": (lambda document: document["rows"][0]["measured"], MEASURED),
    "eager": (lambda document: document["rows"][0]["measured"]["eager"], ERRORS),
    "same_dtype": (lambda document: document["rows"][0]["measured"]["same_dtype"], ERRORS),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_unknown_or_missing_field_is_refused(part):
    find, fields = PARTS[part]
    document = measured_document()
    find(document)["shares"] = 1
    with pytest.raises(ValueError, match="unknown shares; known: "):
        parse(document)
    for field in fields:
        document = measured_document()
        del find(document)[field]
        with pytest.raises(ValueError, match=f"{'' if part == 'row' else part}: no {field}"):
            parse(document)


def test_measurements_say_with_what_they_were_made():
    document = measured_document()
    del document["calibration"]
    with pytest.raises(ValueError, match="measured rows, but no calibration"):
        parse(document)
