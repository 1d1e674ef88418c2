"""The command from end to end with two steps, on a CPU and, with a tiny Llama on the CPU, as on a GPU."""

import importlib.util
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from rl_kernels.core import BackendUnavailable
from rl_kernels.demo import cli, report
from rl_kernels.demo.measures import Gap, Verdict
from rl_kernels.demo.task import CPU, GPU
from rl_kernels.demo.train import StepMetrics, Trainer
from rl_kernels.demo.ways import OURS, STOCK, Numerics

OURS_BF16 = Numerics(OURS, "BF16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def recorded(out):
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    document = json.loads((out / "run.json").read_text(), parse_constant=refuse)
    assert {"device", "torch", "rl-kernels"} <= document["environment"].keys()
    histories = report.read(out / "run.json").histories
    assert all([metrics.step for metrics in history] == [1, 2] for history in histories.values())
    return document, histories


def test_a_short_run_is_judged_by_its_bits_and_says_what_to_try_next(folder, capsys):
    assert cli.main(["--steps", "2", "--seed", "3", "--out", str(folder / "new" / "folder")]) == 0
    lines = capsys.readouterr().out.splitlines()
    document, histories = recorded(folder / "new" / "folder")
    assert document["settings"]["seed"] == 3
    (history,) = histories.values()
    gaps = [*history, history[0].watched[OURS_BF16.name]]
    cases = {each.name: [] for each in (*cli.WATCHED, Numerics(OURS, "FP32"))}
    for case in document["comparison"]:
        cases[case["numerics"]].append(case["gap"])
    assert {len(found) for found in cases.values()} == {2}
    gaps += [Gap(**gap) for name, found in cases.items() for gap in found if name.startswith("rl-kernels")]
    assert sum(gap.mismatches for gap in gaps) == 0
    # Which dtype of stock PyTorch differs depends on the CPU.
    assert sum(gap["mismatches"] for name, found in cases.items() for gap in found if name.startswith("stock")) > 0
    verdict = document["verdict"]
    assert (verdict["compared"], verdict["mismatches"], verdict["enough"]) == (
        sum(gap.tokens for gap in gaps),
        0,
        False,
    )
    start = next(place for place, line in enumerate(lines) if line.startswith("shown   reward: "))
    assert lines[start].endswith(f"; judged from {CPU.steps} steps on")
    assert lines[start + 1].startswith("ok      log-probs through the operators that differ: 0 of ")
    for line, told in zip(lines[start + 3 :], ("rl-kernels audit", "pip install ./shared/core", "trl.md"), strict=True):
        assert told in line
        assert len(line) <= 80


def test_both_runs_of_a_llama_are_recorded_and_ours_is_judged(folder, capsys):
    pytest.importorskip("transformers")
    sizes = {"width": 64, "feed_forward": 128, "layers": 2, "heads": 2, "kv_heads": 1}
    settings = replace(GPU, steps=2, prompts=4, samples_per_prompt=4, shortest=6, measure_every=2, **sizes)
    verdict = cli.run(settings, "cpu", folder, quiet=False)
    document, histories = recorded(folder)
    assert list(histories) == ["rl-kernels", "stock PyTorch"]
    ours, stock = histories.values()
    assert [list(step.watched) for step in ours] == [["rl-kernels, FP32"], []]
    assert [list(step.watched) for step in stock] == [["stock PyTorch, FP32"], []]
    assert min(stock[0].mismatches, stock[0].watched["stock PyTorch, FP32"].mismatches) > 0
    # The stock run's numbers never decide.
    assert verdict.compared == sum(step.tokens for step in ours) + ours[0].tokens
    assert verdict.mismatches == 0
    assert document["backends"]["rl-kernels, FP32"].keys() == document["backends"]["rl-kernels, BF16"].keys() - {
        "grpo_loss"
    }
    assert "log-probs that differ in any bit, FP32    0  " in capsys.readouterr().out


def ends(argv, told, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        *(["--steps", "0"], ["--steps", "many"], ["--seed", "-1"], ["--seed", str(2**63)], ["--unknown"], ["extra"]),
        *(["--device", "tpu"], ["--out", __file__], ["--parallel", "pp"]),
    ],
    ids=" ".join,
)
def test_a_bad_argument_ends_in_one_line_and_status_2(argv, capsys):
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

    monkeypatch.setattr(cli, "why_no_gpu", lambda: None)
    monkeypatch.setattr(cli, "run", too_old)
    ends(["--device", "cuda", "--out", str(tmp_path)], "--device: backend: too old", capsys)


@pytest.mark.parametrize(("last", "mismatches", "status"), [(0.9, 0, 0), (0.9, 1, 1), (0.5, 0, 1)])
@pytest.mark.parametrize(("device", "settings"), [("cpu", CPU), ("cuda", GPU)])
def test_the_exit_status_tells_the_verdict(tmp_path, monkeypatch, device, settings, last, mismatches, status):
    asked = []
    monkeypatch.setattr(cli, "why_no_gpu", lambda: None)
    monkeypatch.setattr(cli, "run", lambda *given: asked.append(given[:2]) or Verdict(0.2, last, 10, mismatches, True))
    assert cli.main(["--device", device, "--steps", "7", "--seed", "5", "--out", str(tmp_path)]) == status
    assert asked == [(replace(settings, steps=7, seed=5), device)]


def gap(mismatches=0, tokens=10):
    return Gap(tokens=tokens, mismatches=mismatches, kl=0.0, largest=0.0)


def metrics(step, **changes):
    given = {"reward": step / 20, "solved": 0.0, "clip_fraction": 0.125, "rollout_seconds": 0.1, "update_seconds": 0.25}
    return StepMetrics(
        **{**vars(gap()), **given, "step": step, "seconds": 0.5, "ratios_off": 0, "watched": {}, **changes}
    )


def watched(ours):
    return {OURS_BF16.name: gap(ours), "stock PyTorch, FP32": gap(3)}


RISING = [metrics(step) for step in range(1, 21)]


def test_the_verdict_needs_a_risen_reward_if_the_run_was_long_enough():
    assert cli.judged(RISING, [], 20).passed
    assert cli.judged(RISING, [report.Comparison(Numerics(STOCK, "FP32"), 1, gap(9))], 20).passed
    assert not cli.judged(RISING[::-1], [], 20).passed
    assert not cli.judged([metrics(step, reward=0.9) for step in range(20)], [], 20).passed
    assert cli.judged(RISING[::-1], [], 21).passed


@pytest.mark.parametrize(
    "changes", [{"mismatches": 1}, {"watched": watched(1)}, None], ids=["trained", "watched", "end"]
)
def test_one_token_of_ours_that_differs_fails(changes):
    last = metrics(20, watched=watched(0)) if changes is None else metrics(20, **{"watched": watched(0), **changes})
    found = cli.judged([*RISING[:-1], last], [report.Comparison(OURS_BF16, 1, gap(int(changes is None)))], 20)
    assert (found.compared, found.mismatches, found.risen, found.passed) == (220, 1, True, False)
    assert not cli.judged([last], [report.Comparison(OURS_BF16, 1, gap(int(changes is None)))], 20).passed


def test_two_runs_stand_side_by_side_without_the_times_of_the_first_step():
    slow = metrics(1, rollout_seconds=9.0, update_seconds=9.0, seconds=30.0)
    fp32 = {"watched": {"FP32": Gap(tokens=30, mismatches=6, kl=3e-9, largest=1e-3)}}
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


def test_plain_bf16_that_differs_nowhere_is_explained_and_text_is_printed_as_it_is():
    def told(*mismatches):
        console = Console(file=io.StringIO(), width=120)
        cases = [
            report.Comparison(Numerics(STOCK, dtype), 1, gap(*each))
            for dtype, each in zip(("FP32", "BF16"), mismatches, strict=True)
        ]
        report.show_comparison(console, cases)
        report.line(console, "[/a]")
        assert "[/a]" in console.file.getvalue()
        return "Stock BF16 differs nowhere" in console.file.getvalue()

    assert told((5,), (0,))
    assert not told((5,), (1,))


def test_the_table_of_steps_has_a_row_for_each_tenth(monkeypatch):
    trainer = Trainer(replace(CPU, steps=25, prompts=1), watched=cli.WATCHED[:1])
    monkeypatch.setattr(
        trainer,
        "step",
        lambda step: metrics(step, mismatches=3, watched={cli.WATCHED[0].name: gap(1)} if step % 2 else {}),
    )
    console = Console(file=io.StringIO(), width=80)
    assert len(report.train(trainer, console)) == 25
    rows = [line.split() for line in console.file.getvalue().splitlines() if "30.00%" in line]
    assert [row[0] for row in rows] == ["3", "6", "9", "12", "15", "18", "21", "24", "25"]
    assert {row[3] for row in rows} == {"10.00%"}


@pytest.mark.gpu
def test_not_one_bit_differs_on_a_gpu(tmp_path):
    verdict = cli.run(replace(GPU, steps=2, measure_every=1), "cuda", tmp_path, quiet=True)
    assert verdict.compared > 0
    assert verdict.mismatches == 0
    histories = report.read(tmp_path / "run.json").histories
    for step in histories["rl-kernels"]:
        assert step.kl == step.largest == step.watched["rl-kernels, FP32"].largest == 0
    assert all(step.ratios_off > 0 for step in histories["stock PyTorch"])
    assert all(step.watched["stock PyTorch, FP32"].mismatches > 0 for step in histories["stock PyTorch"])


@pytest.mark.gpu
def test_a_run_is_repeated_bit_for_bit_on_a_gpu():
    """Weights after some steps, of the embedding too, whose gradient PyTorch adds up in an order that varies."""

    def weights():
        trainer = Trainer(replace(GPU, steps=4, layers=4), OURS, "cuda")
        for step in range(1, 5):
            trainer.step(step)
        return [weight.clone() for weight in trainer.optimizer.masters]

    first = weights()
    for again in (weights(), weights()):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
