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
    facts = {
        "name": "toy_scale",
        "package": "toy_package",
        "summary": "scales",
        "shape": ("N",),
        "rows": frozenset({"N"}),
        "schemas": {},
        "fakes": {},
        "backends": backends,
        "describe": Call.of,
    }
    return Operator(**{**facts, **changes})


def test_arch_of_the_cpu_is_cpu():
    assert arch_of("cpu") == "cpu"


def test_arch_of_a_cuda_device_is_its_compute_capability(monkeypatch):
    monkeypatch.setattr(operator, "_archs", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {None: (9, 0), 1: (12, 0)}[index])
    assert arch_of("cuda") == "sm90"
    assert arch_of("cuda", 1) == "sm120"


def test_arch_of_a_rocm_device_leaves_its_features_out(monkeypatch):
    monkeypatch.setattr(operator, "_archs", {})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert arch_of("cuda", 0) == "gfx942"


def test_call_of_describes_the_leading_tensor():
    call = Call.of(torch.zeros(3, 5, dtype=torch.bfloat16), V=5, bias=True)
    assert call == Call(torch.device("cpu"), torch.bfloat16, "cpu", {"V": 5, "bias": True})


def test_repeatable_promises_all_but_invariance():
    assert {"invariant"} == INVARIANT - REPEATABLE
    assert REPEATABLE < INVARIANT


def test_why_not_names_the_devices_a_backend_runs_on():
    backend = Backend("triton", "toy_triton", {"cuda": INVARIANT, "xpu": REPEATABLE})
    assert backend.why_not(CPU_CALL) == "runs on cuda, xpu, but the tensors are on cpu"


def test_why_not_asks_the_limits_only_on_a_supported_device():
    asked = []

    def limits(call):
        asked.append(call)
        return "V is odd" if call.traits["V"] % 2 else None

    backend = Backend("native", "toy_native", {"cpu": INVARIANT}, limits)
    assert backend.why_not(CPU_CALL) == "V is odd"
    assert backend.why_not(dataclasses.replace(CPU_CALL, traits={"V": 8})) is None
    assert backend.why_not(dataclasses.replace(CPU_CALL, device=torch.device("cuda"))) is not None
    assert len(asked) == 2


def test_without_limits_a_backend_takes_every_call_on_its_devices():
    assert Backend("native", "toy_native", {"cpu": INVARIANT}).why_not(CPU_CALL) is None


def test_backend_module_is_imported_when_it_is_loaded(monkeypatch):
    imported = []
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or name)
    backend = Backend("native", "toy_not_yet_imported", {"cpu": INVARIANT})
    make_operator(backend).backend("native").why_not(CPU_CALL)
    assert imported == []
    assert backend.load() == "toy_not_yet_imported"
    assert imported == ["toy_not_yet_imported"]


def test_backend_by_name():
    first, second = (Backend(name, "toy", {"cpu": INVARIANT}) for name in ("triton", "native"))
    operator = make_operator(first, second)
    assert operator.backend("triton") is first
    assert operator.backend("native") is second


def test_an_unknown_backend_lists_the_known_ones():
    operator = make_operator(*(Backend(name, "toy", {}) for name in ("triton", "native")))
    with pytest.raises(ValueError, match=r"backend: toy_scale has no backend 'cuda'; it has: auto, triton, native"):
        operator.backend("cuda")


def test_function_is_that_of_the_operators_name_unless_another_is_named(make_module):
    def toy_scale():
        pass

    def toy_unscale():
        pass

    make_module("toy_package", toy_scale=toy_scale, toy_unscale=toy_unscale)
    operator = make_operator()
    assert operator.function() is toy_scale
    assert operator.function("toy_unscale") is toy_unscale


def test_distribution_is_what_pip_installs():
    apart = dataclasses.replace(make_operator(), package="rl_kernels.toy_scales", distribution="")
    assert apart.distribution == "rl-kernels-toy-scales"
    assert dataclasses.replace(apart, distribution="elsewhere").distribution == "elsewhere"


def test_a_package_of_several_operators_names_its_distribution_and_a_spec_each(make_module):
    second = dataclasses.replace(make_operator(), distribution="rl-kernels-toy", spec="toy.spec.second_cases")
    assert (second.distribution, second.spec) == ("rl-kernels-toy", "toy.spec.second_cases")
    assert make_operator().spec == f"{make_operator().package}.spec.cases"
    make_module("toy.spec.second_cases", SPEC="the second's")
    assert spec_of(second) == "the second's"


@pytest.mark.parametrize(
    "value", [CPU_CALL, Backend("native", "toy", {}), make_operator()], ids=lambda v: type(v).__name__
)
def test_the_vocabulary_is_frozen(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
