"""The mutator: which edits it makes of a source, in which order, and what it says of each."""

import pytest

from rl_kernels.lab.mutate.edits import drawn, edits_of
from rl_kernels.lab.mutate.judge import CAUGHT, INVALID, SURVIVED, TIMEOUT, Stage, judged

SOURCE = '''
def clamped(x: "a | b", low=0.5):
    """Messages, types and texts are left alone: x + 1 < 2."""
    if x < low:
        raise ValueError(f"{x + 1}")
    x -= min(x, 1)
    return sum(zip(range(x), low, strict=False), start=low)
'''
MADE = [
    ("constant", "0.5", "1.0"),
    ("branch", "x < low", "True"),
    ("branch", "x < low", "False"),
    ("comparison", "x < low", "(x <= low)"),
    ("bound", "low", "(low + 1)"),
    ("bound", "low", "(low - 1)"),
    ("operator", "x -= min(x, 1)", "x += min(x, 1)"),
    ("statement", "x -= min(x, 1)", "pass"),
    ("name", "min", "max"),
    ("constant", "1", "2"),
    ("argument", "sum(zip(range(x), low, strict=False), start=low)", "sum(zip(range(x), low, strict=False))"),
    ("argument", "zip(range(x), low, strict=False)", "zip(low, range(x), strict=False)"),
    ("bound", "x", "(x + 1)"),
    ("bound", "x", "(x - 1)"),
    ("constant", "False", "True"),
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


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("found < size", "(found <= size)", CAUGHT),
        ("found += 1", "pass", TIMEOUT),
        ("len(str())", "1", SURVIVED),
        ("found if size else len(str())", "(found())", INVALID),
        ("abs(n)", "__import__('os')._exit(0)", INVALID),
    ],
)
def test_what_becomes_of_a_mutant(old, new, state, tmp_path):
    (tmp_path / "toy_mutated.py").write_text(MODULE)
    (tmp_path / "test_toy.py").write_text(TEST)
    start = MODULE.index(old)
    edit = edits_of(MODULE)[0]._replace(start=start, end=start + len(old), new=new)
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tmp_path)}
    stage = Stage(("-x", "-c", "/dev/null", str(tmp_path / "test_toy.py")), environment, 3 if state == TIMEOUT else 60)
    assert judged("toy_mutated", edit, [stage]).state == state
    assert (tmp_path / "toy_mutated.py").read_text() == MODULE
