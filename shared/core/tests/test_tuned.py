"""Tables of what was tuned: read as what they are, or refused with the name of the file and what was expected."""

import json
from dataclasses import dataclass

import pytest

from rl_kernels.core import tuned
from rl_kernels.core.tuned import MalformedTable, entry


@dataclass(frozen=True)
class Cut:
    rows: int
    swapped: bool = False


@dataclass(frozen=True)
class Speed:
    cut: Cut
    start: float
    steps: tuple[float, ...]


GOOD = {
    "all": [{"cut": {"rows": 64}, "start": 1, "steps": [0.5, 2]}],
    "one": {"rows": 8, "swapped": True},
    "sizes": {"4": {"BLOCKS": 2}},
}


@pytest.fixture
def table(make_kernels):
    """Return ``write(content)``, which makes a package with that table."""

    def write(content):
        folder = make_kernels("toy_tuned") / "tuned"
        folder.mkdir()
        (folder / "h200.json").write_text(content if isinstance(content, str) else json.dumps(content))
        tuned.tuned.cache_clear()

    yield write
    tuned.tuned.cache_clear()


def test_what_stands_in_a_table(table):
    table(GOOD)
    assert entry("toy_tuned", "all", kind=tuple[Speed, ...]) == (Speed(Cut(64), 1, (0.5, 2)),)
    assert entry("toy_tuned", "one", kind=Cut) == Cut(8, swapped=True)
    assert entry("toy_tuned", "one", "rows", kind=int) == 8
    assert entry("toy_tuned", "sizes", "4", kind=dict[str, int]) == {"BLOCKS": 2}


def speed(**changes):
    return {"all": [{"cut": {"rows": 1}, "start": 1, "steps": [], **changes}]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected JSON: Expecting property name"),
        ("[1]", "the table: expected an object, got [1]"),
        ({}, "the table: expected a key 'all'"),
        ({"all": {}}, "all: expected a list, got {}"),
        ({"all": [1]}, "all[0]: expected an object, got 1"),
        ({"all": [{"cut": {}, "start": 1}]}, "all[0]: expected the keys cut, start, steps, got cut, start"),
        (speed(cut={}), "all[0].cut: expected the keys rows, swapped, got none"),
        (speed(cut={"rows": 1, "row": 2}), "all[0].cut: expected the keys rows, swapped, got rows, row"),
        (speed(cut={"rows": "64"}), 'all[0].cut.rows: expected an integer, got "64"'),
        (speed(cut={"rows": True}), "all[0].cut.rows: expected an integer, got true"),
        (speed(cut={"rows": 1, "swapped": 1}), "all[0].cut.swapped: expected true or false, got 1"),
        (speed(start=None), "all[0].start: expected a number, got null"),
        (speed(steps=["a"]), 'all[0].steps[0]: expected a number, got "a"'),
    ],
)
def test_a_malformed_table_is_refused_by_name(table, content, words):
    table(content)
    with pytest.raises(MalformedTable) as caught:
        entry("toy_tuned", "all", kind=tuple[Speed, ...])
    said = str(caught.value)
    assert said.partition("h200.json: ")[0].endswith("toy_tuned/tuned/")
    assert said.partition("h200.json: ")[2].startswith(words)
    assert "\n" not in said
