"""fused_logp under torch.compile beyond the conformance tests."""

import pytest
import torch

from rl_kernels.core import use_backend
from rl_kernels.fused_logp import fused_logp
from rl_kernels.lab.check.compare import bits


def compiled():
    torch.compiler.reset()
    return torch.compile(fused_logp, fullgraph=True, backend="aot_eager")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 compiles a graph for each value of a number")
def test_temperature_does_not_recompile():
    call = compiled()
    logits, ids = torch.randn(3, 9), torch.tensor([0, 1, 2])
    for temperature in (0.5, 0.6):
        call(logits, ids, temperature=temperature)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for temperature in (0.7, 0.8, 1.3, 2.0):
            found = call(logits, ids, temperature=temperature)
            assert bits(found, fused_logp(logits, ids, temperature=temperature)).passed


def test_rows_do_not_change_bits_of_a_compiled_call():
    call = compiled()
    logits, ids = torch.randn(40, 9), torch.randint(0, 9, (40,))
    expected = fused_logp(logits, ids)
    for rows in (40, 3, 17, 1):
        assert bits(call(logits[:rows], ids[:rows]), expected[:rows]).passed


def test_forced_backend_and_shapes_are_guarded():
    call = compiled()
    logits, ids = torch.randn(3, 9), torch.tensor([0, 1, 2])
    call(logits, ids)
    with use_backend(fused_logp="no-such"), pytest.raises(Exception, match="no backend 'no-such'"):
        call(logits, ids)
    call(logits, ids)
    with pytest.raises(Exception, match="target_ids: expected shape"):
        call(logits, ids[:2])
