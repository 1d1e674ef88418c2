"""Numeric options of operators as flags of ``rl-kernels bench``: whose they are, and what a mistake is told."""

import argparse
import re

import pytest

from rl_kernels.core.command import Parser, number
from rl_kernels.core.operator import Operator
from rl_kernels.lab.bench.definition import GOALS, SMALL, Benchmark, Option, Shape
from rl_kernels.lab.bench.options import add_options, chosen_options


def bench_with(**options):
    shapes = (Shape((8, 16), {"old": 1}, "note"),)
    return Benchmark(("N", "D"), {GOALS: shapes, SMALL: shapes}, lambda *_: {}, {}, options=options)


def operator(name):
    return Operator(name, name, "", ("N", "D"), frozenset(), {}, {}, (), lambda *_, **__: None)


SCALE = Option(number(above=0), "what it is multiplied by")
SHIFT = Option(number(), "what is added", lambda options, value: {**options, "by": value, "shifted": True})
BENCHES = {
    "one": (operator("one"), bench_with(scale_by=SCALE, shift=SHIFT)),
    "two": (operator("two"), bench_with(scale_by=SCALE)),
    "none": (operator("none"), bench_with()),
}


def choose(names, *arguments):
    benches = {name: BENCHES[name] for name in names}
    parser = Parser("bench")
    add_options(parser, benches)
    return chosen_options(*parser.parse_known_args(arguments), benches)


def test_options_are_named_as_arguments_are(capsys):
    assert choose(["one"], "--scale-by", "2", "--shift=-1.5") == {"scale_by": 2.0, "shift": -1.5}
    assert choose(["one", "two"], "--scale-by", "2") == {"scale_by": 2.0}
    assert choose(["none"]) == {}
    # Help lists them with their operators.
    parser = Parser("bench")
    add_options(parser, BENCHES)
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--scale-by X what it is multiplied by (one, two)" in out
    assert "--shift X what is added (one)" in out


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["one"], ["--scale", "2"], "unrecognized arguments: --scale 2; options: one has --scale-by, --shift"),
        (["none"], ["--shift", "2"], "unrecognized arguments: --shift 2; options: none has none"),
        (["one", "two"], ["--shift", "2"], "--shift: two has no such option; give operators that do with --op"),
    ],
)
def test_an_option_that_an_operator_does_not_have(names, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose(names, *arguments)


def test_a_shape_has_them_and_says_so():
    found = BENCHES["one"][1].with_options(Shape((8, 16), {"old": 1}, "note"), {"scale_by": 0.5, "shift": 2.0})
    assert found.options == {"old": 1, "scale_by": 0.5, "by": 2.0, "shifted": True}
    assert found.label == "8x16 note, scale_by=0.5, shift=2"


def test_numbers():
    for kind, bound, bad in (
        (number(), "", ("x", "inf")),
        (number(least=0), " >= 0", ("-0.1",)),
        (number(above=1), " > 1", ("1",)),
    ):
        assert kind("2.5") == 2.5
        for text in bad:
            with pytest.raises(argparse.ArgumentTypeError, match=f"^expected a finite number{bound}, got '{text}'$"):
                kind(text)
