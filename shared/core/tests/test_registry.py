from importlib.metadata import EntryPoint

import pytest

from rl_kernels.core import registry
from rl_kernels.core.operator import Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry, UnknownOperator


def make_operator(name, *aliases):
    return Operator(
        name=name,
        package=f"toy_{name}",
        summary="",
        shape=(),
        rows=frozenset(),
        schemas={},
        fakes={},
        backends=(),
        describe=Call.of,
        aliases=aliases,
    )


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


def test_load_gives_the_operator_of_that_name(installed):
    first, second = make_operator("first"), make_operator("second")
    kernels = installed(first, second)
    assert kernels.load("second") is second
    assert kernels.load("first") is first


def test_get_op_gives_the_public_function(installed):
    kernels = installed(make_operator("first"), make_operator("second"))
    assert kernels.get_op("first")() == "first"
    assert kernels.get_op("second")() == "second"


@pytest.mark.parametrize("name", ["fused_logp", "logp"])
def test_published_alias(installed, name):
    kernels = installed(make_operator("fused_logp", "logp"), make_operator("second"))
    assert kernels.get_op(name)() == "fused_logp"


def test_alias_of_an_operator_that_is_not_published(installed):
    kernels = installed(make_operator("first"), make_operator("second", "other"))
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
    with pytest.raises(UnknownOperator, match=f"{told}.*pip install {distribution}$"):
        installed(make_operator("linear_logp")).get_op(name)


def test_a_published_name_is_never_taken_by_anothers_alias(installed):
    kernels = installed(make_operator("impostor", "logp", "det_gemm"))
    for name in ("logp", "det_gemm"):
        with pytest.raises(UnknownOperator, match="is not installed; from a clone: pip install"):
            kernels.get_op(name)


def test_an_unknown_name_lists_what_there_is(installed):
    kernels = installed(make_operator("second"), make_operator("first", "alias"))
    with pytest.raises(UnknownOperator, match=r"unknown operator 'no_such'; installed: first, second$"):
        kernels.get_op("no_such")


@pytest.mark.parametrize("name", ["", "Det_Gemm", "det-gemm", "det_gem", "det_gemm_dw"])
def test_a_name_that_is_almost_right_is_unknown(installed, name):
    with pytest.raises(UnknownOperator, match="installed: det_gemm"):
        installed(make_operator("det_gemm")).get_op(name)


def test_unknown_name_where_nothing_is_installed(installed):
    with pytest.raises(LookupError, match="installed: none"):
        installed().load("no_such")


def test_an_operator_is_loaded_once(monkeypatch, installed):
    kernels = installed(make_operator("fused_logp", "logp"))
    loads = []
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda self: loads.append(self.name) or load(self))
    assert kernels.load("fused_logp") is kernels.load("fused_logp")
    assert loads == ["fused_logp"]


@pytest.mark.parametrize("member", [make_operator("another"), "not an operator"], ids=["another", "text"])
def test_an_entry_point_must_give_the_operator_it_announces(make_module, member):
    make_module("toy_first", OPERATOR=member)
    kernels = KernelRegistry({"first": EntryPoint("first", "toy_first:OPERATOR", GROUP)})
    with pytest.raises(TypeError, match=f"entry point 'first' of {GROUP} must give the Operator of that name"):
        kernels.load("first")


def test_a_broken_operator_is_not_taken_for_a_missing_one():
    kernels = KernelRegistry({"first": EntryPoint("first", "no_such_module:OPERATOR", GROUP)})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        kernels.load("first")


def test_discovery_reads_the_group_of_operators(monkeypatch):
    point = EntryPoint("first", "toy_first:OPERATOR", GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: {GROUP: [point, point]}[group])
    assert registry._discover() == {"first": point}


def test_discovery_refuses_one_name_for_two_operators(monkeypatch):
    points = [EntryPoint("first", value, GROUP) for value in ("one:OPERATOR", "two:OPERATOR")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(ImportError, match="'first' is announced twice: as one:OPERATOR and as two:OPERATOR"):
        registry._discover()


def test_module_functions_are_those_of_the_installed_registry():
    assert registry.names() == registry.kernel_registry.names()
    for name in registry.names():
        assert registry.load(name) is registry.kernel_registry.load(name)
