import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core import operator
from rl_kernels.core.operator import INVARIANT, REPEATABLE, Backend, Call, Operator, arch_of
from rl_kernels.core.testing import spec_of

CPU_CALL = Call(torch.device("cpu"), torch.float32, "cpu", {"V": 7})


def make_operator(*backends, **changes):
    toy = Operator("toy_scale", "toy_package", "scales", ("N",), frozenset({"N"}), {}, {}, backends, Call.of)
    return dataclasses.replace(toy, **changes)


def test_architectures(monkeypatch):
    assert arch_of("cpu") == "cpu"
    monkeypatch.setattr(operator, "_archs", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {None: (9, 0), 1: (12, 0)}[index])
    assert (arch_of("cuda"), arch_of("cuda", 1)) == ("sm90", "sm120")
    monkeypatch.setattr(operator, "_archs", {})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert arch_of("cuda", 0) == "gfx942"


def test_call_of_describes_the_leading_tensor():
    call = Call.of(torch.zeros(3, 5, dtype=torch.bfloat16), V=5, bias=True)
    assert call == Call(torch.device("cpu"), torch.bfloat16, "cpu", {"V": 5, "bias": True})


def test_why_not_names_the_devices_and_asks_the_limits_only_there():
    backend = Backend("triton", "toy_triton", {"cuda": INVARIANT, "xpu": REPEATABLE})
    assert backend.why_not(CPU_CALL) == "runs on cuda, xpu, but the tensors are on cpu"
    asked = []

    def limits(call):
        asked.append(call)
        return "V is odd" if call.traits["V"] % 2 else None

    backend = Backend("native", "toy_native", {"cpu": INVARIANT}, limits)
    assert backend.why_not(CPU_CALL) == "V is odd"
    assert backend.why_not(dataclasses.replace(CPU_CALL, traits={"V": 8})) is None
    assert backend.why_not(dataclasses.replace(CPU_CALL, device=torch.device("cuda"))) is not None
    assert len(asked) == 2
    assert Backend("native", "toy_native", {"cpu": INVARIANT}).why_not(CPU_CALL) is None
    # What is repeatable promises all but invariance.
    assert {"invariant"} == INVARIANT - REPEATABLE
    assert REPEATABLE < INVARIANT


def test_backends_by_name_are_imported_when_they_are_loaded(monkeypatch):
    imported = []
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or name)
    first, second = (Backend(name, f"toy_unloaded.{name}", {"cpu": INVARIANT}) for name in ("triton", "native"))
    made = make_operator(first, second)
    assert made.backend("triton") is first
    assert made.backend("native") is second
    assert second.why_not(CPU_CALL) is None
    assert imported == []
    assert second.load() == "toy_unloaded.native"
    assert imported == ["toy_unloaded.native"]
    with pytest.raises(ValueError, match=r"backend: toy_scale has no backend 'cuda'; it has: auto, triton, native"):
        made.backend("cuda")


def test_functions_distribution_and_spec_of_a_package(make_module):
    def toy_scale():
        pass

    def toy_unscale():
        pass

    make_module("toy_package", toy_scale=toy_scale, toy_unscale=toy_unscale)
    assert make_operator().function() is toy_scale
    assert make_operator().function("toy_unscale") is toy_unscale
    apart = make_operator(package="rl_kernels.toy_scales", distribution="")
    assert apart.distribution == "rl-kernels-toy-scales"
    assert make_operator().spec == "toy_package.spec.cases"
    # A package of several operators names its distribution, and a spec for each.
    second = make_operator(distribution="rl-kernels-toy", spec="toy.spec.second_cases")
    assert (second.distribution, second.spec) == ("rl-kernels-toy", "toy.spec.second_cases")
    make_module("toy.spec.second_cases", SPEC="the second's")
    assert spec_of(second) == "the second's"
