"""The command with --device cuda: what it writes, its verdict, its mistakes; on the CPU, with a tiny Llama."""

import importlib.util
import io
import json

import pytest
import torch
from rich.console import Console

from rl_kernels.core import BackendUnavailable
from rl_kernels.demo import cli
from rl_kernels.demo.gpu import record, report, run
from rl_kernels.demo.gpu.settings import ModelSizes, Settings
from rl_kernels.demo.gpu.summary import summarised
from rl_kernels.demo.gpu.train import StepMetrics
from rl_kernels.demo.measures import Gap
from rl_kernels.demo.report import TrainingView
from rl_kernels.demo.verdict import Verdict


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("twins")
    settings = Settings(steps=2, seed=3, prompts=4, samples_per_prompt=4, shortest=6, fp32_every=2)
    return run.run(settings, ModelSizes(64, 128, 2, 2, 1), torch.device("cpu"), out, quiet=True), out


def test_the_picture_is_a_png(finished):
    assert (finished[1] / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_record_is_strict_and_whole(finished):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    verdict, out = finished
    document = json.loads((out / "run.json").read_text(), parse_constant=refuse)
    assert document["settings"]["seed"] == 3
    assert document["model"]["parameters"] > 50_000
    assert {"device", "torch", "transformers", "rl-kernels"} <= document["environment"].keys()
    operators = ("det_attention", "det_gemm", "grpo_loss", "linear_logp", "rms_norm")
    assert document["backends"]["BF16"] == dict.fromkeys(operators, "native")
    assert document["backends"]["FP32"] == dict.fromkeys(set(operators) - {"grpo_loss"}, "native")
    ours, stock = document["twins"]["rl-kernels"], document["twins"]["stock PyTorch"]
    for twin in (ours, stock):
        assert [step["step"] for step in twin["steps"]] == [1, 2]
        assert twin["summary"]["rollout_ms"] > 0
        assert twin["summary"]["update_ms"] > 0
        assert twin["steps"][0]["fp32"] is None
        assert twin["steps"][1]["fp32"]["tokens"] == twin["steps"][1]["tokens"]
    assert all(step["mismatches"] == step["kl"] == step["largest"] == 0 for step in ours["steps"])
    assert ours["steps"][1]["fp32"] == {"tokens": ours["steps"][1]["tokens"], "mismatches": 0, "kl": 0, "largest": 0}
    assert sum(step["mismatches"] for step in stock["steps"]) > 0
    assert stock["steps"][1]["fp32"]["mismatches"] > 0
    # The stock twin's numbers never decide.
    tokens = sum(step["tokens"] for step in ours["steps"]) + ours["steps"][1]["tokens"]
    assert document["verdict"]["compared"] == verdict.compared == tokens
    assert document["verdict"]["mismatches"] == 0
    assert document["verdict"]["passed"] is True


def test_a_record_is_read_again(finished):
    found = record.read(finished[1] / "run.json")
    assert list(found.histories) == list(found.summaries) == ["rl-kernels", "stock PyTorch"]
    for name, history in found.histories.items():
        assert summarised(history) == found.summaries[name]
    assert found.parameters > 50_000
    assert "device" in found.environment


@pytest.fixture
def gpu(monkeypatch):
    """Return a setter of what the run on a GPU gives or raises, on a machine that seems to have all it needs."""
    monkeypatch.setattr(run, "why_not", lambda: None)
    asked = []

    def setter(result):
        def pretended(settings, sizes, device, out, quiet):
            asked.append((settings, sizes, device.type))
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(run, "run", pretended)
        return asked

    return setter


@pytest.mark.parametrize(("last", "mismatches", "status"), [(0.9, 0, 0), (0.9, 1, 1), (0.5, 0, 1)])
def test_the_exit_status_tells_the_verdict(gpu, tmp_path, last, mismatches, status):
    asked = gpu(Verdict(first_reward=0.2, last_reward=last, compared=10, mismatches=mismatches, enough=True))
    assert cli.main(["--device", "cuda", "--steps", "7", "--seed", "5", "--out", str(tmp_path)]) == status
    assert asked == [(Settings(steps=7, seed=5), ModelSizes(), "cuda")]


def test_a_gpu_that_the_operators_cannot_run_on_ends_in_one_line_and_status_2(gpu, tmp_path, capsys):
    gpu(BackendUnavailable("backend: too\nold"))
    ends(["--device", "cuda", "--out", str(tmp_path)], "--device: backend: too old", capsys)


def ends(argv, told, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1


def test_an_unknown_device_ends_in_one_line_and_status_2(capsys):
    ends(["--device", "tpu"], "--device", capsys)


def test_a_machine_without_a_gpu_ends_in_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "find_spec", lambda name: object())
    ends(["--device", "cuda"], "no GPU", capsys)


def test_without_transformers_it_ends_in_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        run, "find_spec", lambda name: None if name == "transformers" else importlib.util.find_spec(name)
    )
    ends(["--device", "cuda"], "pip install transformers", capsys)


def metrics(number, **changes):
    given = {"reward": number / 20, "solved": 0.0, "kl": 0.0, "clip_fraction": 0.125, "tokens": 10, "mismatches": 0}
    given |= {"ratios_off": 0, "largest": 0.0, "rollout_seconds": 0.1, "update_seconds": 0.25, "seconds": 0.5}
    return StepMetrics(number, **(given | changes))


def test_a_summary_leaves_the_first_step_out_of_the_times():
    slow = {"rollout_seconds": 9.0, "update_seconds": 9.0, "seconds": 30.0}
    steps = [metrics(1, **slow), *(metrics(number) for number in range(2, 21))]
    found = summarised(steps)
    assert found.reward == pytest.approx((19 / 20 + 1) / 2)
    assert (found.rollout_ms, found.update_ms) == pytest.approx((100, 250))
    assert (found.rollout_seconds, found.update_seconds, found.seconds) == pytest.approx((1.9, 4.75, 9.5))
    assert found.first_seconds == 30
    assert summarised(steps[:1]).rollout_ms == pytest.approx(9000)


def test_a_summary_counts_tokens_of_all_steps():
    found = summarised(
        [
            metrics(1, ratios_off=9, mismatches=10, kl=3e-4, largest=0.1),
            metrics(2, tokens=30, ratios_off=1, mismatches=2, kl=1e-4, largest=0.2),
        ]
    )
    assert found.ratios_off == pytest.approx(10 / 40)
    assert found.mismatches == pytest.approx(12 / 40)
    assert found.largest == 0.2
    assert found.fp32_mismatches is found.fp32_kl is found.fp32_largest is None
    assert found.kl == pytest.approx(2e-4)
    assert found.largest_kl == pytest.approx(3e-4)


def test_a_summary_takes_fp32_from_the_steps_that_measured_it():
    steps = [metrics(1), metrics(2, fp32=Gap(10, 4, 1e-9, 1e-3)), metrics(3, fp32=Gap(30, 6, 3e-9, 1e-4))]
    found = summarised(steps)
    assert found.fp32_mismatches == pytest.approx(10 / 40)
    assert found.fp32_kl == pytest.approx(2e-9)
    assert found.fp32_largest == 1e-3


@pytest.mark.parametrize(("bf16", "fp32"), [(0, 0), (1, 0), (0, 1)])
def test_the_verdict_counts_both_dtypes(bf16, fp32):
    steps = [*(metrics(number) for number in range(1, 20)), metrics(20, mismatches=bf16, fp32=Gap(7, fp32, 0.0, 0.0))]
    found = run.judged(steps)
    assert found.compared == 207
    assert found.mismatches == bf16 + fp32
    assert found.passed == (bf16 + fp32 == 0)


def test_both_twins_are_printed_side_by_side():
    console = Console(file=io.StringIO(), width=80)
    ours = [metrics(number) for number in range(1, 5)]
    stock = [metrics(number, ratios_off=5, kl=2e-4, mismatches=6, rollout_seconds=0.2) for number in range(1, 5)]
    report.show_twins(console, {"one": summarised(ours), "other": summarised(stock)})
    lines = {line.split("│")[1].strip(): line for line in console.file.getvalue().splitlines() if "│" in line}
    cells = [cell.strip() for cell in lines["rollout, ms a step"].split("│")[2:5]]
    assert cells == ["100", "200", "0.50"]
    assert [cell.strip() for cell in lines["KL, nats a token"].split("│")[2:5]] == ["0", "2.0e-04", ""]
    assert "50.00%" in lines["tokens with a ratio other than 1"]
    assert [cell.strip() for cell in lines["log-probs that differ in any bit"].split("│")[2:5]] == ["0", "60.00%", ""]
    assert not [label for label in lines if "FP32" in label]


def test_the_table_of_steps_fits_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    with TrainingView(console, 2, report.COLUMNS, "a twin", report.STEPS_CAPTION) as view:
        view(metrics(1, mismatches=5, kl=2e-4))
        view(metrics(2, fp32=Gap(1000, 1, 1e-9, 1e-3)))
    text = console.file.getvalue()
    assert "…" not in text
    assert "50.00%" in text
    assert "0.10%" in text
    assert "2.0e-04" in text
