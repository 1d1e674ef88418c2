"""The benchmark of grpo_loss on tiny shapes."""

import json

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


def test_the_floor_is_13_bytes_a_token_and_25_with_the_gradient_and_9_without_a_kl():
    with_kl, without = (BENCH.with_options(Shape((512, 16, 4096)), {"beta": beta}) for beta in (0.1, 0.0))
    work = [each.work.bytes for shape in (with_kl, without) for each in BENCH.passes(shape, 4).values()]
    assert [count / (512 * 16 * 4096) for count in work] == [13, 25, 9, 21]
    assert BENCH.with_options(without, {"beta": 0.1}).options == with_kl.options


def bench(file, *arguments):
    """Run ``rl-kernels bench`` on one tiny shape; return the exit status and the records."""
    always = ["--device", "cpu", "--iters", "1", "--warmup", "0", "--json", str(file), "--op", "grpo_loss"]
    status = cli.main([*always, "--shapes", "2x3x5", "--compare", "eager", *arguments])
    return status, json.loads(file.read_text(), parse_constant=pytest.fail)["records"] if status != 2 else []


@pytest.mark.parametrize("beta", [0, 0.3])
def test_options_are_flags(tmp_path, beta):
    status, records = bench(tmp_path / "bench.json", "--clip-eps", "0.1", "--beta", str(beta))
    assert status == 0
    assert [record["implementation"] for record in records] == ["rl-kernels", "eager"]
    for record in records:
        assert record["options"] == {"clip_eps": 0.1, "beta": beta}
        assert record["shape"] == f"2x3x5 clip_eps=0.1, beta={beta}"
        assert len(record["passes"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clip-eps", "-1"], "argument --clip-eps: expected a finite number >= 0, got '-1'"),
        (["--eps", "0"], "argument --eps: expected a finite number > 0, got '0'"),
        (["--beta", "nan"], "argument --beta: expected a finite number >= 0, got 'nan'"),
        (["--delta", "1e39"], "grpo_loss 2x3x5 delta=1e+39: delta: expected a number within"),
        (["--temperature", "2"], "unrecognized arguments: --temperature 2; options: grpo_loss has --clip-eps,"),
    ],
)
def test_options_out_of_range_are_one_line(tmp_path, capsys, arguments, message):
    try:
        status, _ = bench(tmp_path / "bench.json", *arguments)
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
