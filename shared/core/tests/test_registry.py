from importlib.metadata import EntryPoint

import pytest

from rl_kernels.core import registry
from rl_kernels.core.operator import Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry, UnknownOperator


def make_operator(name, *aliases):
    return Operator(name, f"toy_{name}", "", (), frozenset(), {}, {}, (), Call.of, aliases=aliases)


@pytest.fixture
def installed(make_module):
    """Return ``installed(*operators)``: a registry in which just these are announced by entry point."""

    def install(*operators):
        found = {}
        for operator in operators:
            make_module(operator.package, OPERATOR=operator, **{operator.name: lambda name=operator.name: name})
            found[operator.name] = EntryPoint(operator.name, f"{operator.package}:OPERATOR", GROUP)
        return KernelRegistry(found)

    return install


def test_names_are_sorted_and_import_nothing():
    found = {name: EntryPoint(name, "no_such_module:OPERATOR", GROUP) for name in ("second", "first")}
    assert KernelRegistry(found).names() == ["first", "second"]
    # A broken operator is not taken for a missing one.
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        KernelRegistry(found).load("first")


def test_operators_and_functions_by_name_and_alias(installed, monkeypatch):
    logp, second = make_operator("fused_logp", "logp"), make_operator("second", "other")
    kernels, loads, load = installed(logp, second), [], EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda self: loads.append(self.name) or load(self))
    for _ in range(2):
        assert kernels.load("second") is second
        assert kernels.load("fused_logp") is logp
    assert loads == ["second", "fused_logp"]
    for name, function in {"fused_logp": "fused_logp", "logp": "fused_logp", "second": "second"}.items():
        assert kernels.get_op(name)() == function
    # An alias of an operator that is not published.
    assert kernels.get_op("other")() == "second"


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("grpo_loss", "rl-kernels-grpo-loss"),
        ("det_gemm", "rl-kernels-det-gemm"),
        ("fused_logp", "rl-kernels-fused-logp"),
        ("logp", "rl-kernels-fused-logp"),
    ],
)
def test_a_known_operator_that_is_missing_tells_what_to_install(installed, name, distribution):
    folder = distribution.removeprefix("rl-kernels-")
    told = f"operator '{name}' is not installed; from a clone: pip install ./packages/{folder}; "
    # A published name is never taken by another's alias.
    with pytest.raises(UnknownOperator, match=f"{told}.*pip install {distribution}$"):
        installed(make_operator("linear_logp", "logp", "det_gemm")).get_op(name)


@pytest.mark.smoke
def test_an_unknown_name_lists_what_there_is(installed):
    kernels = installed(make_operator("second"), make_operator("first", "alias"))
    with pytest.raises(UnknownOperator, match=r"unknown operator 'no_such'; installed: first, second$"):
        kernels.get_op("no_such")
    for name in ("", "Det_Gemm", "det-gemm", "det_gem", "det_gemm_of"):
        with pytest.raises(UnknownOperator, match="installed: det_gemm"):
            installed(make_operator("det_gemm")).get_op(name)
    with pytest.raises(LookupError, match="installed: none"):
        installed().load("no_such")


@pytest.mark.parametrize("member", [make_operator("another"), "not an operator"], ids=["another", "text"])
def test_an_entry_point_must_give_the_operator_it_announces(make_module, member):
    make_module("toy_first", OPERATOR=member)
    kernels = KernelRegistry({"first": EntryPoint("first", "toy_first:OPERATOR", GROUP)})
    with pytest.raises(TypeError, match=f"entry point 'first' of {GROUP} must give the Operator of that name"):
        kernels.load("first")


def test_discovery_reads_the_group_of_operators_and_refuses_a_name_twice(monkeypatch):
    one, two = (EntryPoint("first", f"{name}:OPERATOR", GROUP) for name in ("one", "two"))
    monkeypatch.setattr(registry, "entry_points", lambda group: {GROUP: [one, one]}[group])
    assert registry._discover() == {"first": one}
    monkeypatch.setattr(registry, "entry_points", lambda group: [one, two])
    with pytest.raises(ImportError, match="'first' is announced twice: as one:OPERATOR and as two:OPERATOR"):
        registry._discover()


def test_module_functions_are_those_of_the_installed_registry():
    assert registry.names() == registry.kernel_registry.names()
    for name in registry.names():
        assert registry.load(name) is registry.kernel_registry.load(name)
