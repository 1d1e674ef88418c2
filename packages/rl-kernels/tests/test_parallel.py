"""The demo over ranks: the command under torchrun."""

import os
import re
import subprocess
import sys

import pytest

# As ``rl-kernels demo``, with fewer sequences than by default.
LAUNCHED = """if True:
    import sys
    from dataclasses import replace
    from rl_kernels.demo import cli, parallel

    cuts, Ranks = [], parallel.Ranks
    parallel.Ranks = lambda group, *rest, **options: cuts.append(group is not None) or Ranks(group, *rest, **options)
    cli.CPU = replace(cli.CPU, prompts=4, samples_per_prompt=8)
    assert cli.main(sys.argv[1:]) == 0
    # In tp the policy is cut over the ranks, but not in the one process that it is compared with.
    assert cuts[0] == ("tp" in sys.argv) and not any(cuts[1:])
"""


@pytest.mark.parametrize("way", ["tp", "dp"])
def test_command(tmp_path, way):
    script = tmp_path / "small.py"
    script.write_text(LAUNCHED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command = [*launch, "--parallel", way, "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    for name, least in (("training", 200), ("process", 100_000)):
        (found,) = re.findall(rf"{name}: 0 of ([\d,]+) differ", done.stdout)
        assert int(found.replace(",", "")) > least
