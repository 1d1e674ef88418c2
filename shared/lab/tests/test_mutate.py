"""The mutator: which edits it makes of a source, in which order, and what it says of each."""

import pytest

from rl_kernels.lab.mutate import judge
from rl_kernels.lab.mutate.edits import drawn, edits_of, statement_at
from rl_kernels.lab.mutate.judge import CAUGHT, INVALID, SURVIVED, TIMEOUT, TracedTest, judged, traced

SOURCE = '''
@overload
def clamped(x: int, low: int = 1) -> int: ...


TILE = Tile(64, 4 if WIDE else 8)


def clamped(x: "a | b", low=0.5):
    """Messages, types and texts are left alone: x + 1 < 2."""
    if x < low:
        raise ValueError(f"{x + 1}")
    x -= min(x, 1, num_warps=4)
    return sum(zip(range(x), low, strict=False), start=low)
'''
MADE = [
    ("constant", "0.5", "1.0"),
    ("branch", "x < low", "True"),
    ("branch", "x < low", "False"),
    ("comparison", "x < low", "(x <= low)"),
    ("bound", "low", "(low + 1)"),
    ("bound", "low", "(low - 1)"),
    ("operator", "x -= min(x, 1, num_warps=4)", "x += min(x, 1, num_warps=4)"),
    ("statement", "x -= min(x, 1, num_warps=4)", "pass"),
    ("name", "min", "max"),
    ("constant", "1", "2"),
    ("argument", "sum(zip(range(x), low, strict=False), start=low)", "sum(zip(range(x), low, strict=False))"),
    ("argument", "zip(range(x), low, strict=False)", "zip(low, range(x), strict=False)"),
    ("bound", "x", "(x + 1)"),
    ("bound", "x", "(x - 1)"),
]
MODULE = """
def steps(n):
    found, size = 0, abs(n)
    while found < size:
        found += 1
    return found if size else len(str())
"""
TEST = """
from toy_mutated import steps

def test_steps():
    assert steps(3) == 3

def test_no_steps():
    assert steps(0) == 0
"""
IN_RANKS = """
from rl_kernels.core.testing.ranks import run_ranks
from toy_mutated import steps

def rank(number):
    return steps(number)

def test_ranks():
    assert run_ranks(rank, 2) == [0, 1]
"""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
STATEMENTS = """
LIMIT = min(
    3, 4)
def clamped(
    x, low=2,
):
    '''Two lines.'''
    if x < low:
        x = max(
            x, low)
    for step in range(
            x):
        pass
    return x
"""


def test_the_edits_of_a_source():
    found = edits_of(SOURCE)
    assert [(edit.kind, edit.old, edit.new) for edit in found] == MADE
    texts = [edit.applied(SOURCE) for edit in found]
    assert len({SOURCE, *texts}) == len(texts) + 1
    for text in texts:
        compile(text, "edited", "exec")


def test_a_seed_gives_the_order():
    first, again, other = (list(drawn({"b": SOURCE, "a": SOURCE}, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other)


def test_a_change_of_other_lines_leaves_the_order():
    def drawn_from(source):
        return [(edit.kind, edit.old, edit.new) for _, edit in drawn({"a": source}, 1) if edit.old != "3"]

    assert drawn_from(SOURCE) == drawn_from(f"LIMIT = 3\n{SOURCE}")


@pytest.mark.parametrize(
    ("line", "lines"),
    [(2, None), (5, None), (8, range(8, 9)), (9, range(9, 11)), (12, range(11, 13)), (14, range(14, 15))],
)
def test_the_statement_at_a_line(line, lines):
    assert statement_at(STATEMENTS, line) == lines


@pytest.mark.parametrize("error", ["TypeError", "AttributeError"])
@pytest.mark.parametrize(
    ("message", "crashed"),
    [
        ("raised {}: not a tensor", True),
        ("logp: got InterpreterError: {}('not a tensor')", True),
        ("{}('not a tensor')", True),
        ("""InterpreterError("{}('not a tensor')")""", True),
        ("rank 1 raised:\nTraceback\n{}: not a tensor", True),
        ("expected a {}", False),
        ("InterpreterError('ValueError(0)')", False),
    ],
)
def test_the_message_of_a_crash(error, message, crashed):
    assert bool(judge.CRASHED.search(message.format(error))) == crashed


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toy_mutated.py").write_text(MODULE)
    (tmp_path / "test_toy.py").write_text(TEST)
    yield tmp_path
    assert (tmp_path / "toy_mutated.py").read_text() == MODULE


def test_the_lines_that_a_test_executes(toy):
    tests, failures = traced(toy, ["test_toy.py"], ALONE)
    lines = {test.name: test.lines[str(toy / "toy_mutated.py")] for test in tests}
    assert lines == {"test_toy.py::test_steps": [3, 4, 5, 6], "test_toy.py::test_no_steps": [3, 4, 6]}
    assert all(0 <= test.seconds < 5 for test in tests)
    assert not failures


def test_a_test_that_fails_is_left_out(toy):
    (toy / "test_toy.py").write_text(f"{TEST}\ndef test_wrong():\n    assert 1 + 1 == 3\n")
    tests, failures = traced(toy, ["test_toy.py"], ALONE)
    assert [test.name for test in tests] == ["test_toy.py::test_steps", "test_toy.py::test_no_steps"]
    assert [text.splitlines()[0] for text in failures] == [
        "test_toy.py::test_wrong: AssertionError: assert (1 + 1) == 3"
    ]


def test_ranks_have_the_mutant_and_report_their_lines(toy):
    (toy / "test_toy.py").write_text(IN_RANKS)
    (test,), _ = traced(toy, ["test_toy.py"], ALONE)
    assert test.lines[str(toy / "toy_mutated.py")] == [3, 4, 5, 6]
    edit = next(edit for edit in edits_of(MODULE) if edit.old == "found < size" and edit.kind == "comparison")
    assert judged("toy_mutated", edit, [test], ALONE).state == CAUGHT
    crash = edit._replace(new="found()")
    assert judged("toy_mutated", crash, [test], ALONE).state == INVALID


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("found < size", "(found <= size)", CAUGHT),
        ("found += 1", "pass", TIMEOUT),
        ("len(str())", "1", SURVIVED),
        ("found if size else len(str())", "(found())", INVALID),
        ("def steps", "1 / 0\ndef steps", INVALID),
        ("abs(n)", "__import__('os')._exit(0)", INVALID),
    ],
)
def test_what_becomes_of_a_mutant(old, new, state, toy, monkeypatch):
    monkeypatch.setattr(judge, "LEAST", 0.5)
    start = MODULE.index(old)
    edit = edits_of(MODULE)[0]._replace(start=start, end=start + len(old), new=new)
    test = TracedTest("test_toy.py::test_steps", 0.0, {})
    assert judged("toy_mutated", edit, [test], ALONE).state == state
