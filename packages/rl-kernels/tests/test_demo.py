"""The command from end to end, with two steps; its verdict; its mistakes."""

import json

import pytest

from rl_kernels.demo import cli
from rl_kernels.demo.compare import Comparison
from rl_kernels.demo.measures import Gap
from rl_kernels.demo.numerics import OURS_BF16, OURS_FP32, PLAIN_BF16, PLAIN_FP32
from rl_kernels.demo.train import StepMetrics


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    status = cli.main(["--steps", "2", "--seed", "3", "--out", str(out), "--quiet"])
    return status, out


def test_two_steps_are_judged_by_their_bits_alone(finished):
    assert finished[0] == 0


def test_the_picture_is_a_png(finished):
    assert (finished[1] / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_record_is_strict_and_whole(finished):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads((finished[1] / "run.json").read_text(), parse_constant=refuse)
    assert record["settings"]["seed"] == 3
    assert [step["step"] for step in record["steps"]] == [1, 2]
    for step in record["steps"]:
        assert step["gap"]["tokens"] > 0
        assert step["gap"]["mismatches"] == step["gap"]["kl"] == step["gap"]["largest"] == step["clipped_at_once"] == 0
        assert step["kl"] >= 0
    watched, nothing = (step["watched"] for step in record["steps"])
    assert watched.keys() == {OURS_BF16.name, PLAIN_BF16.name, PLAIN_FP32.name}
    assert watched[OURS_BF16.name]["mismatches"] == 0 < watched[PLAIN_FP32.name]["mismatches"]
    assert {each["tokens"] for each in watched.values()} == {record["steps"][0]["gap"]["tokens"]}
    assert nothing == {}
    operators = ("det_gemm", "grpo_loss", "linear_logp", "rms_norm")
    assert record["backends"] == dict.fromkeys(operators, "native")
    counts = {case["numerics"]: [] for case in record["comparison"]}
    for case in record["comparison"]:
        counts[case["numerics"]].append(case["gap"]["mismatches"])
    assert counts[OURS_FP32.name] == counts[OURS_BF16.name] == [0, 0]
    # How much PyTorch's own products differ depends on the CPU; on some those of one dtype do not.
    assert sum(counts[PLAIN_BF16.name]) + sum(counts[PLAIN_FP32.name]) > 0
    assert record["verdict"]["mismatches"] == 0
    compared = [step["gap"] for step in record["steps"]] + [watched[OURS_BF16.name]]
    compared += [case["gap"] for case in record["comparison"] if case["numerics"].startswith("rl-kernels")]
    assert record["verdict"]["compared"] == sum(each["tokens"] for each in compared)
    assert [record["verdict"][name] for name in ("enough", "risen", "passed")] == [False, False, True]


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


def test_the_last_lines_say_what_to_try_next(tmp_path, capsys):
    assert cli.main(["--steps", "1", "--out", str(tmp_path)]) == 0
    *_, reward, _, _, one, two, three = capsys.readouterr().out.splitlines()
    assert reward.startswith("shown   reward: ")
    assert reward.endswith("; judged from 200 steps on")
    assert one.startswith("next ")
    assert "rl-kernels audit" in one
    assert "pip install ./shared/core" in two
    assert "docs/recipes/trl.md" in three
    assert max(map(len, (one, two, three))) <= 80


def gap(mismatches=0):
    return Gap(10, mismatches, 0.0, 0.0)


def step(number, reward, mismatches=0, watched=None):
    return StepMetrics(number, reward, 0.0, 0.0, 0.0, 0.0, gap(mismatches), watched or {}, 0.1)


def watched(ours=0):
    return {OURS_BF16.name: gap(ours), PLAIN_FP32.name: gap(3), PLAIN_BF16.name: gap(9)}


def case(numerics, mismatches):
    return Comparison(numerics.name, "1 sequence", gap(mismatches))


RISING = [step(1, 0.0, watched=watched()), *(step(number, number / 200) for number in range(1, 200))]


def test_the_verdict_needs_a_risen_reward_and_no_mismatch():
    clean = [case(OURS_FP32, 0), case(OURS_BF16, 0), case(PLAIN_FP32, 5), case(PLAIN_BF16, 9)]
    assert cli.judged(RISING, clean).passed
    assert cli.judged(RISING, clean).compared == (200 + 1 + 2) * 10
    assert not cli.judged(RISING[::-1], clean).passed
    assert not cli.judged([step(number, 0.9) for number in range(200)], clean).passed


def test_a_run_of_fewer_steps_than_the_default_is_not_judged_by_its_reward():
    short = RISING[198::-1]
    assert cli.judged(short, []).passed
    assert not cli.judged(short, [case(OURS_FP32, 1)]).passed


@pytest.mark.parametrize("numerics", [OURS_FP32, OURS_BF16], ids=lambda numerics: numerics.name)
def test_one_token_of_ours_that_differs_at_the_end_fails(numerics):
    found = cli.judged(RISING, [case(numerics, 1)])
    assert found.risen
    assert found.mismatches == 1
    assert not found.passed


@pytest.mark.parametrize("off", [{"mismatches": 1}, {"watched": watched(1)}], ids=["FP32", "BF16"])
def test_one_token_of_ours_that_differs_in_a_step_fails(off):
    found = cli.judged([*RISING[:-1], step(200, 0.95, **off)], [])
    assert found.mismatches == 1
    assert not found.passed
