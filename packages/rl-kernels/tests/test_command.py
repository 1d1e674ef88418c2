"""The command from end to end with two steps, on a CPU and, with a tiny Llama on the CPU, as on a GPU."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch

from rl_kernels.core import BackendUnavailable
from rl_kernels.demo import cli, report
from rl_kernels.demo.report import judged
from rl_kernels.demo.task import CPU, GPU
from rl_kernels.demo.train import Trainer
from rl_kernels.demo.ways import Ours

OURS_BF16 = Ours("BF16").name


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def recorded(out):
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    document = json.loads((out / "run.json").read_text(), parse_constant=refuse)
    assert {"device", "torch", "rl-kernels"} <= document["environment"].keys()
    assert all([step["step"] for step in steps] == [1, 2] for steps in document["runs"].values())
    return document


def test_a_short_run_is_judged_by_its_bits_and_says_what_to_try_next(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "CPU", replace(small, steps=CPU.steps))
    assert cli.main(["--steps", "2", "--seed", "3", "--out", str(tmp_path / "new" / "folder")]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = recorded(tmp_path / "new" / "folder")
    assert document["settings"]["seed"] == 3
    ((_, steps),), cases = document["runs"].items(), document["comparison"]
    verdict, _ = judged(steps, cases, CPU.steps)
    assert (document["verdict"], verdict["passed"], verdict["enough"]) == (verdict, True, False)
    assert steps[0]["watched"].keys() == {each.name for each in cli.WATCHED}
    for each in (*cli.WATCHED, Ours("FP32")):
        assert [case["sequences"] for case in cases if case["numerics"] == each.name] == [32, 1]
    # Which dtype of stock PyTorch differs depends on the CPU.
    assert sum(case["gap"]["mismatches"] for case in cases if case["numerics"].startswith("stock")) > 0
    start = next(place for place, line in enumerate(lines) if line.startswith("shown   reward: "))
    assert lines[start].endswith(f"; judged from {CPU.steps} steps on")
    assert lines[start + 1].startswith("ok      log-probs through the operators that differ: 0 of ")
    for line, told in zip(lines[start + 3 :], ("rl-kernels audit", "pip install ./shared/core", "trl.md"), strict=True):
        assert told in line
        assert len(line) <= 80


def test_both_runs_of_a_llama_are_recorded_and_ours_is_judged(llama, tmp_path, capsys):
    verdict = cli.run(replace(llama, steps=2), "cpu", tmp_path)
    document = recorded(tmp_path)
    assert list(document["runs"]) == ["rl-kernels", "stock PyTorch"]
    ours, stock = document["runs"].values()
    assert [list(step["watched"]) for step in ours] == [["rl-kernels, FP32"], []]
    assert [list(step["watched"]) for step in stock] == [["stock PyTorch, FP32"], []]
    assert min(stock[0]["mismatches"], stock[0]["watched"]["stock PyTorch, FP32"]["mismatches"]) > 0
    # The stock run's numbers never decide.
    assert verdict["compared"] == sum(step["tokens"] for step in ours) + ours[0]["tokens"]
    assert verdict["mismatches"] == 0
    trained, watched = (document["backends"][f"rl-kernels, {dtype}"].keys() for dtype in ("BF16", "FP32"))
    assert watched == trained - {"grpo_loss"}
    assert "log-probs that differ in any bit, FP32    0  " in capsys.readouterr().out


def ends(argv, told, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1


@pytest.mark.smoke
def test_a_bad_argument_ends_in_one_line_and_status_2(capsys):
    for argv in (
        *(["--steps", "0"], ["--steps", "many"], ["--seed", "-1"], ["--seed", str(2**63)], ["--unknown"], ["extra"]),
        *(["--device", "tpu"], ["--out", __file__], ["--parallel", "pp"]),
    ):
        ends(argv, argv[0], capsys)


def test_a_machine_that_cannot_run_the_llama_ends_in_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli, "find_spec", lambda name: object())
    ends(["--device", "cuda"], "no GPU", capsys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "transformers" else found(name))
    ends(["--device", "cuda"], "pip install transformers", capsys)

    def too_old(*_):
        raise BackendUnavailable("backend: too\nold")

    monkeypatch.setattr(cli, "unusable", lambda arguments: None)
    monkeypatch.setattr(cli, "run", too_old)
    ends(["--device", "cuda", "--out", str(tmp_path)], "--device: backend: too old", capsys)


def test_ranks_that_cannot_train_end_in_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ends(["--parallel", "tp"], "start it with torchrun --nproc-per-node 2 --no-python rl-kernels demo", capsys)
    ends(["--parallel", "dp", "--device", "cuda"], "--parallel: expected --device cpu", capsys)
    for way, ranks in (("tp", "8"), ("tp", "3"), ("dp", "3"), ("dp", "16")):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        ends(["--parallel", way], f"ranks with {way}, got {ranks}", capsys)


@pytest.mark.smoke
def test_the_exit_status_tells_the_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "unusable", lambda arguments: None)
    for device, settings in (("cpu", CPU), ("cuda", GPU)):
        for passed, status in ((True, 0), (False, 1)):
            asked, verdict = [], {"passed": passed}
            monkeypatch.setattr(cli, "run", lambda *call, to=asked, result=verdict: to.append(call[:2]) or result)
            argv = ["--device", device, "--steps", "7", "--seed", "5", "--out", str(tmp_path)]
            assert cli.main(argv) == status
            assert asked == [(replace(settings, steps=7, seed=5), device)]


def gap(mismatches=0, tokens=10, **changes):
    return {"tokens": tokens, "mismatches": mismatches, "kl": 0.0, "largest": 0.0, **changes}


def metrics(step, **changes):
    given = {"reward": step / 20, "solved": 0.0, "clip_fraction": 0.125, "rollout_seconds": 0.1, "update_seconds": 0.25}
    return {**gap(), **given, "step": step, "seconds": 0.5, "ratios_off": 0, "watched": {}, **changes}


def watched(ours):
    return {OURS_BF16: gap(ours), "stock PyTorch, FP32": gap(3)}


def case(name, mismatches):
    return {"numerics": name, "sequences": 1, "gap": gap(mismatches)}


RISING = [metrics(step) for step in range(1, 21)]


@pytest.mark.smoke
def test_the_verdict_needs_a_risen_reward_if_the_run_was_long_enough():
    level = [metrics(step, reward=0.9) for step in range(20)]
    for steps, cases, needed, passed in (
        (RISING, [], 20, True),
        (RISING, [case("stock PyTorch, FP32", 9)], 20, True),
        (RISING[::-1], [], 20, False),
        (level, [], 20, False),
        (RISING[::-1], [], 21, True),
    ):
        assert judged(steps, cases, needed)[0]["passed"] == passed


@pytest.mark.smoke
def test_one_token_of_ours_that_differs_fails():
    """In training, in what is watched beside it, and at the end."""
    for changes, at_the_end in (({"mismatches": 1}, 0), ({"watched": watched(1)}, 0), ({}, 1)):
        last = metrics(20, **{"watched": watched(0), **changes})
        verdict, text = judged([*RISING[:-1], last], [case(OURS_BF16, at_the_end)], 20)
        assert (verdict["compared"], verdict["mismatches"], verdict["passed"]) == (220, 1, False)
        assert text.startswith("ok      reward risen by at least 0.5: ")
        assert "FAILED  log-probs through the operators that differ: 1 of 220" in text
        assert not judged([last], [case(OURS_BF16, at_the_end)], 20)[0]["passed"]


@pytest.mark.smoke
def test_two_runs_stand_side_by_side_without_the_times_of_the_first_step():
    slow = metrics(1, rollout_seconds=9.0, update_seconds=9.0, seconds=30.0)
    fp32 = {"watched": {"FP32": gap(6, 30, kl=3e-9, largest=1e-3)}}
    ours = [slow, *RISING[1:-1], metrics(20, **fp32)]
    stock = [metrics(step, ratios_off=5, mismatches=6, kl=2e-4, rollout_seconds=0.2, **fp32) for step in range(1, 21)]
    rows = {label: cells for label, *cells in report.side_by_side({"ours": ours, "stock": stock})}
    assert rows["log-probs that differ in any bit"] == ["0", "60.00%", ""]
    assert rows["log-probs that differ in any bit, FP32"] == ["20.00%", "20.00%", ""]
    assert rows["KL, nats a token"] == ["0", "2.0e-04", ""]
    assert rows["largest distance of a ratio from 1, FP32"] == ["1.0e-03", "1.0e-03", ""]
    assert rows["reward, last tenth of the steps"] == ["0.975", "0.975", ""]
    assert rows["tokens with a ratio other than 1"] == ["0.00%", "50.00%", ""]
    assert rows["rollout, ms a step"] == ["100", "200", "0.50"]
    assert rows["update, s"] == ["4.8", "4.8", "1.00"]
    assert rows["the first, s"][0] == "30.0"


@pytest.mark.gpu
def test_not_one_bit_differs_on_a_gpu(tmp_path):
    verdict = cli.run(replace(GPU, steps=2, measure_every=1), "cuda", tmp_path)
    assert verdict["compared"] > 0
    assert verdict["mismatches"] == 0
    ours, stock = recorded(tmp_path)["runs"].values()
    for step in ours:
        assert step["kl"] == step["largest"] == step["watched"]["rl-kernels, FP32"]["largest"] == 0
    assert all(step["ratios_off"] > 0 for step in stock)
    assert all(step["watched"]["stock PyTorch, FP32"]["mismatches"] > 0 for step in stock)


@pytest.mark.gpu
def test_a_run_is_repeated_bit_for_bit_on_a_gpu():
    """Weights after some steps, of the embedding too, whose gradient PyTorch adds up in an order that varies."""

    def weights():
        trainer = Trainer(replace(GPU, steps=4, layers=4), Ours, "cuda")
        for step in range(1, 5):
            trainer.step(step)
        return [weight.clone() for weight in trainer.masters]

    first = weights()
    for again in (weights(), weights()):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
