"""The benchmark of grpo_loss on tiny shapes."""

import json
from argparse import ArgumentTypeError

import pytest

from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.grpo_loss.spec.bench import BENCH, TYPES
from rl_kernels.lab.bench import cli
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (
        Shape((2, 4, 16)),
        Shape((3, 2, 7), {"density": 0.5}, "half masked"),
        Shape((2, 3, 5), {"beta": 0.0, "ref": None}, "no KL"),
        *(
            Shape(
                (2, 3, 5), {"loss_type": name, "kl_correction": True, **options}, name, without=frozenset({"compile"})
            )
            for name, options in TYPES.items()
        ),
    )
    # Plain PyTorch takes even its sums in BF16 there, and is off by a tenth.
    dtypes = ("fp32",)


def test_bytes_per_token():
    with_kl, without = (BENCH.with_options(Shape((512, 16, 4096)), {"beta": beta}) for beta in (0.1, 0.0))
    work = [each.work.bytes for shape in (with_kl, without) for each in BENCH.passes(shape, 4).values()]
    assert [count / (512 * 16 * 4096) for count in work] == [13, 25, 9, 21]
    assert BENCH.with_options(without, {"beta": 0.1}).options == with_kl.options


def test_options_are_flags_with_bounds(tmp_path):
    file = tmp_path / "bench.json"
    command = (
        "--device cpu --iters 1 --warmup 0 --op grpo_loss --shapes 2x3x5 --compare eager --clip-eps 0.1 --beta 0.3"
    )
    assert cli.main([*command.split(), "--json", str(file)]) == 0
    records = json.loads(file.read_text(), parse_constant=pytest.fail)["records"]
    assert [record["implementation"] for record in records] == ["rl-kernels", "eager"]
    for record in records:
        assert record["options"] == {"clip_eps": 0.1, "beta": 0.3}
        assert record["shape"] == "2x3x5 clip_eps=0.1, beta=0.3"
        assert len(record["passes"]) == 2
    for name, wrong in (("clip_eps", "-1"), ("clip_low", "-1"), ("clip_high", "-1"), ("beta", "-1"), ("eps", "0")):
        with pytest.raises(ArgumentTypeError, match="expected a finite number"):
            BENCH.options[name].type(wrong)
