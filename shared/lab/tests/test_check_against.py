"""A report compared with an earlier one."""

import copy
import json

import pytest

from rl_kernels.lab.check.reports.against import compared, read_report


def check(case, *, passed=True, max_abs=1e-6, message=""):
    name = f"double/native/fp32/accuracy/{case}"
    return {"case_id": name, "output": "output", "passed": passed, "max_abs": max_abs, "message": message}


def report(*checks, own=3, **settings):
    ran = {"dtype": "fp32", "cases_with_own_kernels": own, "message": "" if own else "none of its own kernels"}
    candidate = {"operator": "double", "name": "native", "outputs": list(checks), "ran": [ran]}
    environment = {"torch": "2.13", **settings}
    others = {"suite_name": "quick", "contract_version": "1", "seeds": {"seed": 1}, "environment": environment}
    return {"candidates": [candidate], **others}


THEN = report(check("plain"), check("wrong", passed=False))
BEFORE = THEN["candidates"][0]["outputs"]
OWN = "double/native/fp32: own kernels"
PLAIN, WRONG, MORE = (f"double/native/fp32/accuracy/{case}: output" for case in ("plain", "wrong", "more"))


def nothing(**changes):
    kinds = ("failed", "vanished", "fixed", "new", "grown", "settings")
    regressed = bool({"failed", "vanished"} & changes.keys())
    return {"regressed": regressed, **{kind: [] for kind in kinds}, **changes}


@pytest.mark.parametrize(
    ("now", "changes"),
    [
        (THEN, nothing()),
        (report(check("plain"), check("wrong")), nothing(fixed=[WRONG])),
        (
            report(check("plain", passed=False, message="off\nby 1"), check("wrong", passed=False)),
            nothing(failed=[f"{PLAIN}: off by 1"]),
        ),
        (report(check("plain")), nothing(vanished=[WRONG])),
        (report(*BEFORE, check("more")), nothing(new=[MORE])),
        (report(*BEFORE, check("more", passed=False, message="off")), nothing(failed=[f"{MORE}: off"])),
        (
            report(check("plain", max_abs=2.1e-6), check("wrong", passed=False)),
            nothing(grown=[f"{PLAIN}: max_abs 1e-06, now 2.1e-06"]),
        ),
        (report(check("plain", max_abs=2e-6), check("wrong", passed=False)), nothing()),
        (report(check("plain", max_abs=None), check("wrong", passed=False)), nothing()),
        (report(*BEFORE, own=0), nothing(failed=[f"{OWN}: none of its own kernels"])),
        (report(*BEFORE, torch="2.14"), nothing(settings=["torch: 2.13, now 2.14"])),
        (
            {**THEN, "chosen": {"batch": 2, "contract_file": "mine.json"}},
            nothing(settings=["batch: None, now 2", "contract_file: None, now mine.json"]),
        ),
    ],
)
def test_changes(now, changes):
    assert compared(now, THEN).document() == changes


def test_a_report_without_kernels_is_older():
    old = copy.deepcopy(THEN)
    del old["candidates"][0]["ran"]
    assert compared(THEN, old).document() == nothing(new=[OWN])
    # A call that raised is fixed when its outputs are checked.
    for passed, kind in ((False, "fixed"), (True, "vanished")):
        then = report({**check("plain", passed=passed), "output": "forward"})
        name = PLAIN.replace("output", "forward")
        assert compared(report(check("plain")), then).document() == nothing(**{kind: [name]}, new=[PLAIN])


NOT_STRICT, TOO_DEEP = json.dumps(THEN).replace("1e-06", "NaN"), "[" * 100_000


def test_what_is_no_report_is_refused(tmp_path):
    path = tmp_path / "old.json"
    for text in ("", "[]", "{}", '{"candidates": [{}]}', NOT_STRICT, TOO_DEEP):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a report of `rl-kernels check --json`"):
            read_report(path)
