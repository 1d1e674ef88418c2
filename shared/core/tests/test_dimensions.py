"""Cases along dimensions: every pair that is possible is met, and what is drawn is always the same."""

from itertools import combinations

import pytest

from rl_kernels.core.testing.dimensions import HELD, drawn, paired, pairs, swept

AXES = {"a": (None, 1, 2), "b": (None, "x", "y", "z"), "c": (None, True), "d": (0.5, 1.5)}


def met(rows, axes=AXES):
    """Return every two options that stand together in a row."""
    full = [{name: row.get(name) for name in axes} for row in rows]
    return {pair for row in full for pair in combinations(row.items(), 2)}


def wanted(axes=AXES, possible=lambda options: True):
    return {
        ((first, one), (second, other))
        for first, second in combinations(axes, 2)
        for one in axes[first]
        for other in axes[second]
        if possible({name: value for name, value in ((first, one), (second, other)) if value is not None})
    }


def test_every_two_values_meet():
    rows = pairs(AXES)
    assert met(rows) == wanted()
    # All combinations would be 48.
    assert len(rows) < 20


def test_what_is_left_out_is_no_option():
    assert all(value is not None for row in pairs(AXES) for value in row.values())


def not_one_and_x(options):
    return not (options.get("a") == 1 and options.get("b") == "x") and not (
        options.get("c") and options.get("d") == 0.5
    )


def test_what_cannot_stand_together_does_not():
    rows = pairs(AXES, not_one_and_x)
    assert all(map(not_one_and_x, rows))
    assert met(rows) == wanted(possible=not_one_and_x)


def test_a_pair_that_no_whole_combination_holds_is_given_up():
    axes = {"a": (1, 2), "b": (1, 2), "c": (1, 2)}

    def possible(options):
        return len(options) < 3 or options["a"] == 1

    rows = pairs(axes, possible)
    assert rows
    assert all(map(possible, rows))


def test_a_choice_that_leads_nowhere_is_taken_back():
    axes = {"a": (1, 2), "b": (1, 2), "c": (1, 2), "d": (1, 2)}

    def possible(options):
        # 1 fits for c until d is chosen.
        return not (options.get("b") == 1 and options.get("c") == 1 and "d" in options)

    assert met(pairs(axes, possible), axes) == wanted(axes) - {(("b", 1), ("c", 1))}


@pytest.mark.parametrize("possible", [lambda options: True, not_one_and_x])
def test_drawn_cases_are_always_the_same_and_possible(possible):
    first, again = (list(drawn("some", {"rows": 2}, AXES, 30, possible)) for _ in range(2))
    assert first == again
    assert len({case.name for case in first}) == 30
    assert all(possible(case.options) for case in first)
    assert len({tuple(case.options.items()) for case in first}) > 10
    assert list(drawn("other", {"rows": 2}, AXES, 30, possible)) != first


def test_a_sweep_takes_its_options_in_turn():
    cases = list(swept("rows", {"rows": 0, "width": 5}, (1, 2, 3), ({}, {"a": 1})))
    assert [case.name for case in cases] == ["rows-1", "rows-2", "rows-3"]
    assert [dict(case.sizes) for case in cases] == [{"rows": n, "width": 5} for n in (1, 2, 3)]
    assert [dict(case.options) for case in cases] == [{}, {"a": 1}, {}]
    assert all((case.relations, case.suite) == (HELD, "quick") for case in cases)


def test_a_dtype_is_the_case_s_own_and_no_option():
    cases = list(paired("pairs", {}, {"dtype": (None, "fp64"), "a": (None, 1)}, grad=False))
    assert {case.dtype for case in cases} == {"", "fp64"}
    assert all("dtype" not in case.options for case in cases)
    assert not any(case.grad for case in cases)
    assert len({case.name for case in cases}) == len(cases)
