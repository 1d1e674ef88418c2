"""What importing core does not do."""

import pytest

from rl_kernels import core

EVERY_MODULE = """
import importlib, pkgutil, sys, warnings
import torch  # which brings a part of cuda.bindings where that is installed
warnings.simplefilter("error")
before = set(sys.modules)
import rl_kernels.core
NAMES = ("arithmetic", "gemm", "gemm_kernels", "min_logit", "peer_kernels", "peers", "softcap", "softmax", "sums")
KERNELS = {f"rl_kernels.core.triton_lib.{name}" for name in NAMES}
names = {module.name for module in pkgutil.walk_packages(rl_kernels.core.__path__, "rl_kernels.core.")}
assert names > KERNELS
for name in sorted(names - KERNELS):
    if not name.endswith("__main__"):
        importlib.import_module(name)
LIBRARIES = {"triton", "cuda", "cuda.bindings.nvrtc", "rl_kernels.fused_logp"}
brought = LIBRARIES & sys.modules.keys() - before
assert not brought, brought
assert not torch.cuda.is_initialized()
assert torch.get_default_dtype() == torch.float32
"""


def test_importing_every_module_but_kernels_brings_no_gpu_library_and_prints_nothing(run_code):
    done = run_code(EVERY_MODULE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_pytest_plugin_brings_no_torch(run_python):
    done = run_python("-c", "import sys, rl_kernels.core.pytest_plugin; sys.exit('torch' in sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_is_there_and_no_other():
    namespace = {}
    exec("from rl_kernels.core import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(core.__all__) <= set(dir(core))
    for name in ("no_such", "AUTO"):
        with pytest.raises(AttributeError, match=f"module 'rl_kernels.core' has no attribute '{name}'"):
            getattr(core, name)
