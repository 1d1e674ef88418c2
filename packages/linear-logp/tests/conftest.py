"""The backends of a GPU."""

import pytest
import torch


@pytest.fixture(params=["cuda-sm90", "triton"])
def gpu_backend(request: pytest.FixtureRequest) -> str:
    """Return the name of a backend that needs a GPU, if this one has its architecture."""
    if request.param == "cuda-sm90" and torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("needs sm_90")
    return str(request.param)
