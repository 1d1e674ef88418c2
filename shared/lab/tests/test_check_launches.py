"""Whether a check of a backend saw its kernels run, and which backend ``auto`` chose."""

import json
from contextlib import contextmanager
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from rl_kernels.core.dispatch import choose
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.testing import Case
from rl_kernels.lab.check import cli, launches
from rl_kernels.lab.check.launched import Launched

OWN = Launched("toy_pkg.triton_lib.code", "", "forward", "")
SHARED = Launched("toy_pkg", "generic.cu", "forward", "sm_90")
CASES = (Case("plain", {"batch": 3, "width": 4}), Case("wide", {"batch": 3, "width": 600}, relations=("accuracy",)))
BACKENDS = tuple(
    Backend(name, f"toy_pkg.backends.{name}.backend", {"cpu": INVARIANT}) for name in ("kernels", "native")
)
OPERATOR = Operator("double", "toy_pkg", "twice", ("N",), frozenset({"N"}), {}, {}, BACKENDS, lambda x, **_: Call.of(x))


@pytest.fixture(autouse=True)
def toy(install, doubled, make_module, monkeypatch):
    """An operator whose backend ``kernels`` launches its own kernel for rows of 500 numbers and more."""
    recorded = []

    def double(x, *, backend=None):
        if choose(OPERATOR, Call.of(x), backend).name == "kernels":
            for found in recorded:
                found.add(OWN if x.shape[-1] >= 500 else SHARED)
        return 2 * x

    @contextmanager
    def record():
        recorded.append(set())
        yield recorded[-1]
        recorded.pop()

    monkeypatch.setattr(launches, "record_launches", record)
    make_module("toy_pkg.backends.kernels.backend")
    return install(cli, OPERATOR, replace(doubled, cases=CASES), double=double)


def check(*flags):
    return cli.main(["--device", "cpu", *flags])


def report(capsys):
    return json.loads(capsys.readouterr().out)


def test_the_cases_that_launched_own_kernels_are_counted(capsys):
    assert check("--candidate", "kernels", "--json") == 0
    (ran,) = report(capsys)["candidates"][0]["ran"]
    assert ran == {
        "dtype": "fp32",
        "cases": 2,
        "backends": {"kernels": 2},
        "kernels": [
            {"name": str(OWN), "cases": 1, "own": True},
            {"name": str(SHARED), "cases": 1, "own": False},
        ],
        "cases_with_own_kernels": 1,
        "without_own_kernels": ["plain"],
        "message": "",
    }
    assert check("--candidate", "kernels") == 0
    first, *lines, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("PASS double kernels: ")
    assert lines[:3] == [
        "  fp32: own kernels in 1 of 2 cases",
        "    in 1: toy_pkg.triton_lib.code.forward (own)",
        "    in 1: toy_pkg/generic.cu:forward for sm_90",
    ]


def test_a_backend_that_launched_none_of_its_own_kernels_fails(capsys, tmp_path):
    fault = "none of its own kernels was launched in 2 fp32 cases"
    junit, page = tmp_path / "report.xml", tmp_path / "report.html"
    # Every comparison passes.
    assert check("--candidate", "kernels", "--width", "5", "--json", "--junit", str(junit), "--html", str(page)) == 1
    found = report(capsys)
    assert (found["passed"], found["pass_rate"], found["candidates"][0]["passed"]) == (False, 1.0, False)
    assert found["candidates"][0]["ran"][0]["message"] == fault
    failures = ElementTree.parse(junit).getroot().findall(".//failure")
    assert [each.get("message") for each in failures] == [fault]
    assert '<td class="fail">none</td>' in page.read_text()
    assert check("--candidate", "kernels", "--width", "5") == 1
    assert f"  FAIL {fault}" in capsys.readouterr().out.splitlines()


def test_one_case_need_not_launch_own_kernels():
    assert check("--replay", "double/kernels/fp32/accuracy/plain") == 0


def test_what_peers_launch_does_not_count(capsys):
    assert check("--candidate", "native", "--relation", "parity", "--json") == 0
    assert report(capsys)["candidates"][0]["ran"] == []


def test_auto_names_the_backend_that_ran(capsys):
    assert check("--json") == 0
    (ran,) = report(capsys)["candidates"][0]["ran"]
    assert (ran["backends"], ran["cases_with_own_kernels"]) == ({"kernels": 2}, None)
    assert check() == 0
    assert capsys.readouterr().out.startswith("PASS double auto on kernels: ")


def test_a_case_for_a_gpu_is_skipped_elsewhere(toy, capsys):
    toy.SPEC = replace(toy.SPEC, cases=(*CASES, Case("huge", {"batch": 1, "width": 1 << 40}, gpu=True)))
    assert check("--json", "--relation", "accuracy") == 0
    assert [(skip["case"], skip["reason"]) for skip in report(capsys)["skipped"]] == [
        ("huge", "so large that it runs on a GPU only")
    ]
