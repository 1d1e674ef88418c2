"""Cases along dimensions: every pair that is possible is met, and what is drawn is always the same."""

from itertools import combinations

import pytest

from rl_kernels.lab.dimensions import CHECKED, drawn, paired, pairs, swept

AXES = {"a": (None, 1, 2), "b": (None, "x", "y", "z"), "c": (None, True), "d": (0.5, 1.5)}
TWO = dict.fromkeys("abcd", (1, 2))


def anything(options):
    return True


def not_one_and_x(options):
    return not (options.get("a") == 1 and options.get("b") == "x") and not (
        options.get("c") and options.get("d") == 0.5
    )


def first_leads_nowhere(options):
    # 1 fits for c until d is chosen.
    return not (options.get("b") == 1 and options.get("c") == 1 and "d" in options)


def met(rows, axes):
    """Return every two options that stand together in a row."""
    full = [{name: row.get(name) for name in axes} for row in rows]
    return {pair for row in full for pair in combinations(row.items(), 2)}


def wanted(axes, possible):
    return {
        ((first, one), (second, other))
        for first, second in combinations(axes, 2)
        for one in axes[first]
        for other in axes[second]
        if possible({name: value for name, value in ((first, one), (second, other)) if value is not None})
    }


@pytest.mark.parametrize(
    ("axes", "possible", "never"),
    [(AXES, anything, set()), (AXES, not_one_and_x, set()), (TWO, first_leads_nowhere, {(("b", 1), ("c", 1))})],
)
def test_every_two_values_that_may_stand_together_meet(axes, possible, never):
    rows = pairs(axes, possible)
    assert met(rows, axes) == wanted(axes, possible) - never
    assert all(map(possible, rows))
    assert all(value is not None for row in rows for value in row.values())
    # All combinations of the first would be 48.
    assert len(rows) < 20


def test_a_pair_that_no_whole_combination_holds_is_given_up():
    rows = pairs(dict.fromkeys("abc", (1, 2)), lambda options: len(options) < 3 or options["a"] == 1)
    assert rows
    assert {row["a"] for row in rows} == {1}


@pytest.mark.parametrize("possible", [anything, not_one_and_x])
def test_drawn_cases_are_always_the_same_and_possible(possible):
    first, again = (list(drawn("some", {"rows": 2}, AXES, 30, possible)) for _ in range(2))
    assert first == again
    assert len({case.name for case in first}) == 30
    assert all(possible(case.options) for case in first)
    assert len({tuple(case.options.items()) for case in first}) > 10
    assert list(drawn("other", {"rows": 2}, AXES, 30, possible)) != first


def test_cases_of_a_sweep_and_of_pairs():
    cases = list(swept("rows", {"rows": 0, "width": 5}, (1, 2, 3), ({}, {"a": 1})))
    assert [case.name for case in cases] == ["rows-1", "rows-2", "rows-3"]
    assert [dict(case.sizes) for case in cases] == [{"rows": n, "width": 5} for n in (1, 2, 3)]
    assert [dict(case.options) for case in cases] == [{}, {"a": 1}, {}]
    assert all((case.relations, case.suite) == (CHECKED, "quick") for case in cases)
    cases = list(paired("pairs", {}, {"dtype": (None, "fp64"), "a": (None, 1)}, grad=False))
    assert {case.dtype for case in cases} == {"", "fp64"}
    assert all("dtype" not in case.options for case in cases)
    assert not any(case.grad for case in cases)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.drawn_as for case in cases} == {"pairs"}
