"""The demo over ranks: the command under torchrun, and what it refuses."""

import os
import re
import subprocess
import sys

import pytest
import torch

from rl_kernels.demo import cli
from rl_kernels.demo.parallel import count


@pytest.mark.parametrize("way", ["tp", "dp"])
def test_command(way):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "rl_kernels.demo", "--parallel", way, "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    logps, weights = (re.search(rf"{name}: 0 of ([\d,]+) differ", done.stdout) for name in ("training", "process"))
    assert int(logps[1].replace(",", "")) > 500
    assert int(weights[1].replace(",", "")) > 100_000


def test_it_counts_differing_weights():
    value = torch.linspace(-1, 1, 9)
    changed = value.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    assert count({"weight": value}, {"weight": value.clone()}) == 0
    assert count({"weight": value}, {"weight": changed}) == 1


def test_without_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--parallel", "tp"])
    assert ended.value.code == 2
    assert "start it with torchrun --nproc-per-node 2 -m rl_kernels.demo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--parallel", "dp", "--device", "cuda"])
    assert "--parallel: expected --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("way", "ranks"), [("tp", "8"), ("tp", "3"), ("dp", "3"), ("dp", "16")])
def test_numbers_of_ranks_that_cannot_share(monkeypatch, capsys, way, ranks):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit):
        cli.main(["--parallel", way])
    assert f"ranks with {way}, got {ranks}" in capsys.readouterr().err
