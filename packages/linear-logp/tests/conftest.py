"""Marks of the quick tests that core's rules make, and the backends of a GPU."""

import pytest
import torch

SMOKE = {f"test_relation[native-{relation}-fp32-bias]" for relation in ("accuracy", "gradients", "invariance")}
SMOKE.add("test_relation[native-robustness-fp32-plain]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in SMOKE:
            item.add_marker(pytest.mark.smoke)


@pytest.fixture(params=["cuda-sm90", "triton"])
def gpu_backend(request: pytest.FixtureRequest) -> str:
    """Return the name of a backend that needs a GPU, if this one has its architecture."""
    if request.param == "cuda-sm90" and torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")
    return str(request.param)
