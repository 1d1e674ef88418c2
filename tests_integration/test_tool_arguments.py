"""Arguments that the tools refuse, in one line, before they do or write anything."""

from pathlib import Path

import pytest
import torch
from forked import TOOLS, forked, imported

pytest.importorskip("transformers")
# What these two import is in the copies then.
imported("grpo_step")
imported("model_step")

GRPO = "grpo_step.py --layers 2 --hidden 64 --heads 4 --vocab 500 --prompts 2 --samples 4 --tokens 24 --device cpu"
SANITIZE = "sanitize.py --device cpu --backend native --sanitizer true"
LESS = "expected an integer >= 1, got '0'"
FILE = "expected a file that can be written"
NAMED = "expected lower-case words joined by underscores"
REFUSED = [
    (f"{GRPO} --layers 0", f"argument --layers: {LESS}"),
    (f"{GRPO} --samples 1", "argument --samples: expected an integer >= 2, got '1'"),
    (f"{GRPO} --tokens many", "argument --tokens: expected an integer >= 2, got 'many'"),
    (f"{GRPO} --hidden 60", "--hidden: expected a multiple of twice --heads (8), got 60"),
    (f"{GRPO} --limit-gib nan", "argument --limit-gib: expected a number >= 0, got 'nan'"),
    (f"{GRPO} --json /nowhere/step.json", f"argument --json: {FILE}"),
    (f"{GRPO} --backend cuda-sm90 --dtype bf16", "BackendUnavailable: "),
    (f"{GRPO} --device cuda", "--device: this PyTorch sees no GPU"),
    ("client_calls.py --device cpu --rows 0", f"argument --rows: {LESS}"),
    ("client_calls.py --device cpu --parts attention", "--parts: attention needs a GPU"),
    ("client_calls.py --device cuda", "--device: this PyTorch sees no GPU"),
    ("experiment.py runs.pt --device=cpu", "log: expected a name that ends in .jsonl, got 'runs.pt'"),
    ("experiment.py runs.jsonl --samples=1", "argument --samples: expected an integer >= 2, got '1'"),
    ("mismatch.py --steps=0", f"argument --steps: {LESS}"),
    ("mismatch.py --jobs=0", f"argument --jobs: {LESS}"),
    ("mismatch.py --json=/nowhere/runs.json", f"argument --json: {FILE}"),
    ("sampler_bias.py --answers 0", f"argument --answers: {LESS}"),
    ("mismatch.py --read=/nowhere/runs.json", "argument --read: expected a record of this tool, got "),
    *(
        (f"model_step.py --sizes {text}", "argument --sizes: expected sizes")
        for text in ("2", "2x", "2x0", "2x3x4", "axb")
    ),
    (f"{SANITIZE} --sanitizer no-such-program", "--sanitizer: no program 'no-such-program' was found"),
    (f"{SANITIZE} --op no_such", "--op: expected one of "),
    (f"{SANITIZE} --jobs 0", f"argument --jobs: {LESS}"),
    ("calibrate.py --seeds 0", "argument --seeds: "),
    ("calibrate.py --suite tiny", "argument --suite: "),
    ("calibrate.py more", "unrecognized arguments: more"),
    *((f"new_operator.py {name} --into .", "NAME: ") for name in ("Soft-Cap", "soft_cap", "1st", "demo", "''")),
    ("new_operator.py capping --operator soft-cap --into .", f"--operator: {NAMED}"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_refused(command: str, message: str, tmp_path: Path) -> None:
    if "--device cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    name, *options = command.replace("''", "\0").split()
    done = forked((TOOLS / name, *(option.strip("\0") for option in options)), tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2, done.stderr
    *usage, error = done.stderr.splitlines()
    assert message in error
    assert not usage or name == "calibrate.py"
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
