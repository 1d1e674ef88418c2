"""``activate()``: what is active within it, what behind it, and what is in the dispatcher."""

import warnings

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _registry

from rl_kernels.models.clients import torch as client
from rl_kernels.models.clients.torch import HOOK, NAME, OPS, activate


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert attention.current_flash_attention_impl() is None


@pytest.fixture
def hook(monkeypatch):
    """Return the log of two other implementations, A and B, where PyTorch believes that it sees a GPU."""
    log = []

    class Handle:
        def __init__(self, name):
            self.name = name

        def remove(self):
            log.append(f"-{self.name}")

    def register(name):
        log.append(f"+{name}")
        return Handle(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    for name in ("A", "B"):
        attention.register_flash_attention_impl(name, register_fn=lambda name=name: register(name))
    yield log
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def registered():
    """Return which of the ops have a kernel of ours, by the place that the dispatcher notes."""
    names = (name for name in OPS if hasattr(torch.ops.aten, name))
    return [name for name in names if "/rl_kernels/" in torch._C._dispatch_dump(f"aten::{name}")]


def test_it_is_active_until_it_is_undone(hook):
    handle = activate()
    assert (attention.current_flash_attention_impl(), handle.before) == (NAME, None)
    assert registered() == [name for name in OPS if hasattr(torch.ops.aten, name)]
    for name in registered():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    handle.undo()
    assert attention.current_flash_attention_impl() is None
    assert registered() == []
    handle.undo()
    with pytest.raises(KeyError), activate():
        raise KeyError
    assert attention.current_flash_attention_impl() is None
    assert registered() == []
    assert hook == []


SEQUENCES = {
    "nested": ("A +1 +2 -2 -1", "A us us us A", "+A -A +A"),
    "others in between": ("+1 A +2 -2 -1", "us A us A None", "+A -A +A -A"),
    "another order": ("B +1 +2 +3 -2 -1 -3 -1 -2", "B us us us us us B B B", "+B -B +B"),
    "another found in between": ("B +1 A +2 -1 -2", "B us A us us A", "+B -B +A -A +A"),
    "restored by somebody else": ("+1 restore -1", "us None None", ""),
}
"""Steps, such as the first activation (+1) and its undoing (-1); what is active after each; what A and B were told."""


@pytest.mark.parametrize("name", SEQUENCES)
def test_what_is_active_after_each_step(hook, caplog, name):
    handles = {}
    steps, expected, told = SEQUENCES[name]
    for step, active in zip(steps.split(), expected.split(), strict=True):
        if step == "restore":
            attention.restore_flash_attention_impl()
        elif step in ("A", "B"):
            attention.activate_flash_attention_impl(step)
        elif step.startswith("+"):
            handles[step[1:]] = activate()
        else:
            handles[step[1:]].undo()
        assert str(attention.current_flash_attention_impl()) == active.replace("us", NAME), step
        assert bool(registered()) == (active == "us")
    assert hook == told.split()
    # PyTorch warns where there is nothing to restore.
    assert not caplog.records


def test_the_hook_knows_it_by_name_from_then_on(hook):
    activate().undo()
    assert NAME in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl(NAME)
    assert registered()
    attention.restore_flash_attention_impl()
    assert registered() == []


def test_a_handle_that_somebody_keeps_leaves_nothing_behind():
    handle = client.Registered()
    assert registered()
    handle.remove()
    assert registered() == []
    handle.remove()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 takes no second kernel from Python for an op")
def test_what_pytorch_has_is_overridden_without_a_warning(hook):
    """On a GPU there is a kernel for each op, of which PyTorch warns once; tests turn warnings into errors."""
    theirs = torch.library.Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        # A build with CUDA has a kernel before this one.
        warnings.simplefilter("ignore")
        theirs.impl("_flash_attention_forward", print)
    torch.set_warn_always(True)
    try:
        with activate():
            assert registered()
    finally:
        torch.set_warn_always(False)
    assert registered() == []
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
    del theirs


def test_an_error_gives_back_what_was_active(hook, monkeypatch):
    attention.activate_flash_attention_impl("A")

    def broken():
        raise OSError("no kernels today")

    monkeypatch.setattr(client, "Registered", broken)
    with pytest.raises(OSError, match="today"):
        activate()
    assert attention.current_flash_attention_impl() == "A"
    assert registered() == []


def test_another_version_of_pytorch_is_told(hook, monkeypatch):
    told = r"^torch: expected a version with torch.{}, such as 2.11"
    for name in HOOK:
        with monkeypatch.context() as patch:
            patch.delattr(attention, name)
            with pytest.raises(RuntimeError, match=told.format(f"nn.attention.{name}")):
                activate()
    monkeypatch.setitem(OPS, "_no_such_op", print)
    with pytest.raises(RuntimeError, match=told.format("ops.aten._no_such_op")):
        activate()
    # An op of later versions may be missing.
    monkeypatch.setattr(client, "LATER", client.LATER | {"_no_such_op"})
    with activate():
        assert registered()


def test_a_cpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="GPU"):
        activate()
