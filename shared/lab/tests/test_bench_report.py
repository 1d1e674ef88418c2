"""What a record says of a time, and how the tables and remarks put it."""

from dataclasses import replace

import pytest

from rl_kernels.lab.bench.definition import Work
from rl_kernels.lab.bench.measure import EVENTS, GRAPH, Ceilings, Timing
from rl_kernels.lab.bench.record import OURS, Document, Measured, Record, read
from rl_kernels.lab.bench.report import as_markdown, digits, remarks, tables

CEILINGS = Ceilings(4e12, 800e12, "a copy", "a product")


def measured(ms, ours=None, work=None, how=GRAPH):
    timing = Timing(ms, how, 1e3 * ms + 10, 5.0, 1)
    return Measured.of(timing, work or Work(4e9, 1.0), CEILINGS, ours and Timing(ours, GRAPH, 1e3 * ours + 10, 5.0, 1))


def record(name, shape="8", **others):
    return Record("toy", shape, (8,), "all", "bf16", name, **others)


def test_what_bounds_the_work_gives_rate_and_share():
    moved = measured(2.0, work=Work(4e9, 8e11))
    assert (moved.unit, moved.rate, moved.share) == ("TB/s", pytest.approx(2.0), pytest.approx(0.5))
    computed = measured(2.0, work=Work(1e9, 8e11))
    assert (computed.unit, computed.rate, computed.share) == ("TFLOP/s", pytest.approx(400.0), pytest.approx(0.5))


def test_geometric_means_of_a_group():
    records = [
        *(record(OURS, shape, passes={"forward": measured(1.0)}) for shape in "ab"),
        record("eager", "a", passes={"forward": measured(1.0, 1.0)}),
        record("eager", "b", passes={"forward": measured(4.0, 1.0)}),
    ]
    _, (title, rows) = tables(Document({}, {}, records))
    assert title == "toy, bf16: geometric means of ours / theirs"
    assert rows == [("shapes", "implementation", "forward"), ("all", "eager", "0.500")]


def test_a_ratio_is_to_what_was_timed_in_turn():
    beside = Timing(2.0, GRAPH, 10.0, 5.0, 1, beside_ms=0.5)
    found = Measured.of(beside, Work(4e9, 1.0), CEILINGS, Timing(1.0, GRAPH, 10.0, 5.0, 1))
    assert found.ratio == 0.25
    records = [record(OURS, passes={"forward": measured(1.0)}), record("eager", passes={"forward": found})]
    assert "ours / theirs: 1 of 1 ratios are of samples in turn with ours" in remarks(records)


def test_launches_are_columns_where_they_were_counted():
    counted = replace(measured(1.0), timing=Timing(1.0, GRAPH, 1010.0, 5.0, 1, 3, 0))
    records = [record(OURS, passes={"forward": counted}), record("eager", passes={"forward": measured(1.0, 1.0)})]
    ((_, (head, *rows)),) = tables(Document({}, {}, [replace(each, group="") for each in records]))
    assert head[-1] == "launches, waits"
    assert [row[-1] for row in rows] == ["3, 0", "-, -"]
    ((_, (head, *_)),) = tables(Document({}, {}, [replace(records[1], group="")]))
    assert head[-1] == "call, ours / theirs"


def test_tokens_a_second_stand_beside_the_rate_where_they_are_counted():
    records = [record(OURS, passes={"forward": measured(2.0)}, tokens=3_000_000)]
    (_, (head, row)), *_ = tables(Document({}, {}, records))
    assert (head[3], row[3]) == ("rate, G tokens/s", "2.00 TB/s, 1.50")


def test_remarks_name_the_few_that_another_clock_took():
    records = [
        *(record(OURS, shape, passes={"forward": measured(1.0)}) for shape in "ab"),
        record("cce", "a", passes={"forward": measured(1.0, 1.0, how=EVENTS)}, note="unfiltered"),
        record("liger", "a", skipped={"": "absent"}),
        record("liger", "b", skipped={"forward": "no memory"}),
    ]
    assert list(remarks(records)) == [
        "skipped: toy: liger: absent (a)",
        "skipped: toy: liger, forward: no memory (b)",
        "toy: cce: unfiltered",
        "clock: CUDA graph, 2 times",
        "clock: events, 1 times (toy cce a)",
        "ours / theirs: 0 of 1 ratios are of samples in turn with ours",
    ]


def test_angle_brackets_are_no_html():
    skipped = record("flex", skipped={"": "TypeError: flex.<locals>.call() got 'window'"})
    assert "- skipped: toy: flex: TypeError: flex.\\<locals>.call() got 'window'" in as_markdown(
        Document({}, {}, [skipped])
    )


def test_a_document_is_read_as_it_was_written_and_another_is_refused(tmp_path):
    document = Document({"device": "toy"}, {"bf16": CEILINGS}, [record(OURS, passes={"forward": measured(1.0)})])
    document.write(tmp_path / "a.json")
    assert read(tmp_path / "a.json") == document
    assert as_markdown(read(tmp_path / "a.json")) == as_markdown(document)
    for text in ("[]", "{}", '{"version": 1}'):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match="expected benchmark results of version 2"):
            read(tmp_path / "a.json")


def test_three_digits():
    known = {0.0: "0", 0.00123456: "0.00123", 1.0: "1.00", 12.34: "12.3", 1234.5: "1234"}
    assert {value: digits(value) for value in known} == known
