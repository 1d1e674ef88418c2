"""A report as JUnit XML, which Jenkins, GitLab and others read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from rl_kernels.lab.check.reports import summary
from rl_kernels.lab.check.reports.summary import LaunchSummary, printable
from rl_kernels.lab.check.result import Check, Skip
from rl_kernels.lab.check.suite import Report

COUNTED = {"tests": "testcase", "failures": "testcase/failure", "skipped": "testcase/skipped"}
"""The counts of a suite, by the elements that they count."""


def write_junit(report: Report, path: Path | str) -> None:
    """Write a suite for each operator, candidate and dtype.

    Raises:
        OSError: the file cannot be written.
    """
    root = Element("testsuites", name=summary.suite_name(report))
    root.extend(_suites(report))
    totals = {name: sum(int(suite.get(name, 0)) for suite in root) for name in COUNTED}
    _count(root, totals)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suites(report: Report) -> Iterator[Element]:
    groups = summary.grouped(report.records, lambda record: (record.operator, record.candidate, record.dtype))
    launched = {
        (entry.operator, entry.candidate, entry.dtype): entry
        for entry in summary.launch_summaries(report)
        if entry.kernels_said
    }
    for words, records in groups.items():
        tests = [_check(record, report) if isinstance(record, Check) else _skip(record) for record in records]
        if words in launched:
            tests.append(_launched(launched[words]))
        yield _suite(".".join(words), tests, report)


def _suite(name: str, tests: list[Element], report: Report) -> Element:
    suite = Element("testsuite", name=printable(name))
    properties = SubElement(suite, "properties")
    known = {
        **summary.environment(report),
        **summary.seeds(report),
        "contract_version": report.plan.setting.contract.version,
    }
    for key, value in known.items():
        SubElement(properties, "property", name=key, value=printable(str(value)))
    suite.extend(tests)
    _count(suite, {attribute: len(suite.findall(path)) for attribute, path in COUNTED.items()})
    return suite


def _count(element: Element, counts: dict[str, int]) -> None:
    for name, count in {**counts, "errors": 0}.items():
        element.set(name, str(count))
    # Readers expect the attribute, but the checker measures no times.
    element.set("time", "0")


def _test(name: str, *words: str) -> Element:
    return Element("testcase", classname=printable(".".join(words)), name=printable(name), time="0")


def _check(check: Check, report: Report) -> Element:
    test = _test(f"{check.case}: {check.item}", check.operator, check.candidate, check.dtype, check.relation)
    comparison = check.comparison
    if not check.passed:
        failure = SubElement(test, "failure", type=check.relation, message=printable(comparison.message))
        lines = {"worst": comparison.worst, "shape": summary.shape_said(check), "tolerance": check.tolerance}
        lines |= {"seed": str(check.seed), "replay": report.replay(check)}
        details = [f"{name}: {value}" for name, value in lines.items() if value]
        failure.text = printable("\n".join([comparison.message, *details, comparison.traceback]).rstrip())
    return test


def _launched(entry: LaunchSummary) -> Element:
    test = _test("kernels", entry.operator, entry.candidate, entry.dtype, "launches")
    if entry.failed:
        SubElement(test, "failure", type="launches", message=entry.fault)
    SubElement(test, "system-out").text = printable("\n".join(entry.kernels_said))
    return test


def _skip(skip: Skip) -> Element:
    test = _test(skip.case, skip.operator, skip.candidate, skip.dtype, skip.relation)
    SubElement(test, "skipped", message=printable(skip.reason))
    return test
