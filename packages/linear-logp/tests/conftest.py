"""Marks of the quick tests that core's rules make."""

import pytest

SMOKE = {f"test_relation[native-{relation}-fp32-bias]" for relation in ("accuracy", "gradients", "invariance")}
SMOKE.add("test_relation[native-robustness-fp32-plain]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in SMOKE:
            item.add_marker(pytest.mark.smoke)
