"""The command from end to end, with two steps; its verdict; its mistakes."""

import json

import pytest

from rl_kernels.demo import cli
from rl_kernels.demo.compare import Comparison
from rl_kernels.demo.train import StepMetrics
from rl_kernels.demo.verdict import judge


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    status = cli.main(["--steps", "2", "--seed", "3", "--out", str(out), "--quiet"])
    return status, out


def test_two_steps_are_too_few_for_the_reward_to_rise(finished):
    assert finished[0] == 1


def test_the_picture_is_a_png(finished):
    assert (finished[1] / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_record_is_strict_and_whole(finished):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads((finished[1] / "run.json").read_text(), parse_constant=refuse)
    assert record["settings"]["seed"] == 3
    assert [step["step"] for step in record["steps"]] == [1, 2]
    assert all(step["tokens"] > 0 and step["mismatches"] == 0 and step["kl"] >= 0 for step in record["steps"])
    operators = ("det_gemm", "grpo_loss", "linear_logp", "rms_norm")
    assert record["backends"] == dict.fromkeys(operators, "native")
    counts = {case["arithmetic"]: [] for case in record["comparison"]}
    for case in record["comparison"]:
        counts[case["arithmetic"]].append(case["mismatches"])
    assert counts["rl-kernels"] == [0, 0]
    assert sum(counts["plain PyTorch"]) > 0
    assert record["verdict"]["mismatches"] == 0
    assert record["verdict"]["passed"] is False


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**63)], "--seed"),
        (["--unknown"], "--unknown"),
        (["extra"], "extra"),
    ],
)
def test_a_bad_argument_ends_in_one_line_and_status_2(argv, named, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert named in line
    assert line.count("\n") == 1


def test_an_out_that_is_a_file_ends_in_one_line_and_status_2(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["--out", str(file)]) == 2
    line = capsys.readouterr().err
    assert "--out" in line
    assert line.count("\n") == 1


def step(number, reward, mismatches=0):
    return StepMetrics(number, reward, 0.0, 0.0, 0.0, 10, mismatches, 0.1)


def case(mismatches):
    return Comparison("rl-kernels", "1 sequence", 10, mismatches, 0.0)


def test_the_verdict_needs_a_risen_reward_and_no_mismatch():
    rising = [step(number, number / 20) for number in range(20)]
    assert judge(rising, [case(0)]).passed
    assert judge(rising, [case(0)]).compared == 21 * 10
    assert not judge(rising[::-1], [case(0)]).passed
    assert not judge([step(number, 0.9) for number in range(20)], [case(0)]).passed
    assert not judge(rising, [case(0), case(1)]).passed
    assert not judge([*rising[:-1], step(19, 0.95, mismatches=1)], [case(0)]).passed
