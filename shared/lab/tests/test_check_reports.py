"""Reports: every form says what was found, and nothing that a candidate writes breaks it."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from rl_kernels.lab.check.cell import Setting
from rl_kernels.lab.check.compare import Comparison
from rl_kernels.lab.check.plan import Part, Plan
from rl_kernels.lab.check.reports.document import as_json, document_of
from rl_kernels.lab.check.reports.html import write_html
from rl_kernels.lab.check.reports.junit import write_junit
from rl_kernels.lab.check.reports.summary import percent, printable, shape_said
from rl_kernels.lab.check.reports.text import text
from rl_kernels.lab.check.result import Check, Skip
from rl_kernels.lab.check.suite import Report

PART = Part(Setting("fp32", torch.device("cpu"), "cpu", seed=5), [])
PLAN = Plan([PART, Part(replace(PART.setting, dtype="bf16"), [])], ["accuracy", "invariance", "parity"])
HOSTILE = "<script>alert('x')</script> & \"quotes\" \x1b[31m \x00 \ud800 ]]>\nsecond line"
HOLDS = Comparison(True, 1e-7, 1e-8, 2e-7, worst="at [1, 2] got 1, expected 1.0000001")
BROKEN = Comparison(False, 0.5, 0.25, math.inf, "2 of 12 elements differ in bits", "at [0, 3] got 1, expected 2, 9 ULP")
RAISED = Comparison(False, message=f"raised ValueError: {HOSTILE}", traceback=f"Traceback:\n  deep\n{HOSTILE}")

GOOD = Check("double", "native", "accuracy", "plain", "output", "fp32", (3, 4), "1e-05/0", HOLDS, 77)
BITS = replace(GOOD, relation="invariance", item="batch", tolerance="bitwise", comparison=BROKEN)
ERROR = replace(BITS, dtype="bf16", case="large", shape=(), comparison=RAISED)
SKIP = Skip("double", "native", "parity", "plain", "fp32", "no other backend runs <here>")
ABSENT = Skip("double", "cuda-sm90", "all", "all", "fp32", "runs on cuda")

GREEN = Report(PLAN, (GOOD,))
RED = Report(PLAN, (ABSENT, GOOD, BITS, ERROR, SKIP))


class Page(HTMLParser):
    """What a browser would see: tags with attributes, and text with the tag that it directly follows."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.said, self._inside = [], [], ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        self.said.append((self._inside, data.strip()))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def inside(self, tag):
        return [data for name, data in self.said if name == tag and data]


@pytest.fixture
def page(tmp_path):
    def written(report):
        file = tmp_path / "report.html"
        write_html(report, file)
        return file.read_text(encoding="utf-8")

    return written


@pytest.fixture
def junit(tmp_path):
    def written(report):
        file = tmp_path / "report.xml"
        write_junit(report, file)
        return ElementTree.parse(file).getroot()

    return written


def test_text_of_a_check_that_holds():
    verdict = "PASS rl-kernels quick fp32,bf16 cpu: 1 of 1 checks passed (100.0%), 0 skipped"
    assert list(text(GREEN)) == ["PASS double native: 1 of 1", verdict]
    first, *lines, last = text(GREEN, verbose=True)
    assert (first, last) == ("PASS double native: 1 of 1", verdict)
    numbers = "max_abs=1e-07 mean_abs=1e-08 max_rel=2e-07 tolerance=1e-05/0"
    assert lines == [f"  PASS accuracy plain: output [3x4] fp32 {numbers}"]


def test_text_of_a_failure_says_how_to_run_it_again():
    lines = list(text(RED))
    at = next(n for n, line in enumerate(lines) if line.startswith("  FAIL invariance plain: batch [3x4] fp32"))
    assert lines[at].endswith("seed=77: 2 of 12 elements differ in bits")
    assert lines[at + 1] == f"    replay: {RED.replay(BITS)}"
    assert "--replay double/native/fp32/invariance/plain" in lines[at + 1]
    assert sum("replay:" in line for line in lines) == 2


def test_text_keeps_a_line_for_a_message_and_one_for_each_reason_to_skip():
    line = next(line for line in text(RED) if "raised ValueError" in line)
    assert line.endswith("second line")
    assert "\\x1b[31m \\x00 \\ud800" in line
    assert all(line.isprintable() for line in text(RED))
    lines = list(text(replace(GREEN, records=(GOOD, SKIP, replace(SKIP, case="large")))))
    assert lines[-2] == "skipped double native parity (2): no other backend runs <here>"


def test_words_of_a_report():
    assert shape_said(replace(GOOD, shape=())) == "scalar"
    assert shape_said(ERROR) == "-"
    # A share is not rounded up to all.
    assert [percent(1999, 2000), percent(2000, 2000), percent(0, 0)] == ["99.9%", "100.0%", "0.0%"]
    assert printable("a\tb\nc é 漢 \x7f\x85\ufffe") == "a\tb\nc é 漢 \\x7f\\x85\\ufffe"


def test_json():
    document = json.loads(as_json(document_of(RED)), parse_constant=pytest.fail)
    assert (document["passed"], document["pass_rate"]) == (False, 1 / 3)
    (candidate,) = document["candidates"]
    assert (candidate["operator"], candidate["name"], candidate["passed"]) == ("double", "native", False)
    good, bits, error = candidate["outputs"]
    assert good["worst"] == HOLDS.worst
    assert "traceback" not in good
    assert (bits["case_id"], bits["replay"]) == (BITS.case_id, RED.replay(BITS))
    assert (bits["max_abs"], bits["max_rel"]) == (0.5, None)
    assert (error["message"], error["traceback"]) == (RAISED.message, RAISED.traceback)
    assert document["seeds"] == {"seed": 5, "grad_seed": 123}
    assert [skip["candidate"] for skip in document["skipped"]] == ["cuda-sm90", "native"]


def test_junit_counts(junit):
    root = junit(RED)
    names = ["double.cuda-sm90.fp32", "double.native.fp32", "double.native.bf16"]
    assert [suite.get("name") for suite in root] == names
    keys = ("tests", "failures", "skipped", "errors")
    counts = [tuple(int(suite.get(key)) for key in keys) for suite in (root, *root)]
    assert counts == [(5, 2, 2, 0), (1, 0, 1, 0), (3, 1, 1, 0), (1, 1, 0, 0)]
    for suite in root:
        assert len(suite.findall("testcase")) == int(suite.get("tests"))
        assert {test.get("time") for test in suite.findall("testcase")} == {"0"}


def test_junit_failures(junit):
    tests = {(test.get("classname"), test.get("name")): test for test in junit(RED).iter("testcase")}
    failure = tests["double.native.fp32.invariance", "plain: batch"].find("failure")
    assert failure.get("message") == BROKEN.message
    for said in (f"worst: {BROKEN.worst}", "seed: 77", "tolerance: bitwise", f"replay: {RED.replay(BITS)}"):
        assert said in failure.text.splitlines()
    assert tests["double.native.fp32.accuracy", "plain: output"].find("failure") is None
    skipped = tests["double.native.fp32.parity", "plain"].find("skipped")
    assert skipped.get("message") == SKIP.reason
    # Any message is held.
    failure = junit(RED).find("testsuite[@name='double.native.bf16']/testcase/failure")
    assert failure.get("message") == printable(RAISED.message)
    assert "<script>alert('x')</script> & \"quotes\" \\x1b[31m \\x00 \\ud800 ]]>\nsecond line" in failure.get("message")
    assert failure.text.endswith(printable(RAISED.traceback))


def test_html_needs_nothing_else(page):
    markup = page(RED)
    seen = Page(markup)
    targets = [value for _, attributes in seen.tags for key, value in attributes.items() if key in ("src", "href")]
    assert targets
    assert all(target.startswith("#") or target == "data:," for target in targets)
    assert not re.search(r"https?://|@import|url\(", markup)
    assert not seen.all("script")
    assert "<script" not in markup
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {attributes["href"][1:] for attributes in seen.all("a")} <= set(ids)


def test_html_heat_map(page):
    seen = Page(page(RED))
    squares = {(attributes["class"], attributes["title"]) for attributes in seen.all("a") if "title" in attributes}
    assert squares == {
        ("all", "1 of 1 passed"),
        ("none", "0 of 1 passed"),
        ("skip", "1 skipped: no other backend runs <here>"),
        ("absent skip", "1 skipped: runs on cuda"),
    }
    assert [said for said in seen.inside("a") if "/" in said] == ["1/1", "0/1", "0/1"]


def test_html_shows_commands_and_messages_as_text(page):
    seen = Page(page(RED))
    assert sorted(seen.inside("code")) == sorted(RED.replay(check) for check in (GOOD, BITS, ERROR))
    assert any("<script>alert('x')</script>" in said and "\\x1b[31m" in said for said in seen.inside("div"))
    assert any("<script>alert('x')</script>" in said for said in seen.inside("pre"))


def test_a_run_without_checks_is_no_pass(page, junit):
    empty = Report(PLAN, ())
    (verdict,) = text(empty)
    assert verdict.startswith("FAIL")
    assert "Nothing ran" in page(empty)
    assert junit(empty).get("tests") == "0"
    assert "FAIL" in Page(page(Report(PLAN, (ABSENT,)))).inside("span")
