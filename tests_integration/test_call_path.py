"""What runs between a call and its launches (`tools/call_path.py`), and the page that says so (`docs/call.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from documents import ROOT
from forked import imported

from rl_kernels.core.registry import kernel_registry

call_path = imported("call_path")

MOST = 6
"""Frames between the caller, or autograd, and a launch, or for ``native`` the function that runs the op."""
READ = 8
"""Files that a reader opens, from the repository's README and ``docs/call.md`` to a kernel."""
KEYWORDS = 17
"""Keyword arguments of a public function; ``linear_logp`` has 14."""
SPINE = ("core/torchlib/ops.py", "core/torchlib/derivatives.py", "core/triton_lib/launch.py")
"""Files that all operators share, which the page describes."""


def paths() -> Iterator[tuple[str, str, str, call_path.Path]]:
    for name, backend, *both in call_path.paths():
        for step, path in zip(("forward", "backward"), both, strict=True):
            yield name, backend, step, path


def rows() -> dict[tuple[str, str], list[list[str]]]:
    """Return the files of each row of the page: of the forward pass, the backward pass, and the kernels."""
    found = re.findall(
        r"^\| `(\w+)` \| `([\w-]+)` \| (.+) \|$", (ROOT / "docs/call.md").read_text("utf-8"), re.MULTILINE
    )
    return {
        (name, backend): [re.findall(r"`(.+?)`", cell) for cell in rest.split("|")] for name, backend, rest in found
    }


def test_few_frames_between_a_call_and_its_launches() -> None:
    measured = list(paths())
    assert len(measured) == 2 * sum(map(len, call_path.BACKENDS.values()))
    for name, backend, step, path in measured:
        assert 0 < path.frames <= MOST, (name, backend, step)


def test_page_names_the_files_of_a_call() -> None:
    page = rows()
    for name, backend, step, path in paths():
        package = kernel_registry.load(call_path.OPERATORS.get(name, name)).package.rpartition(".")[2]
        files = [file.removeprefix(f"{package}/") for file in path.files if file not in SPINE]
        if backend == "native":
            assert files[-1] in ("backends/native.py", "backends/native/backend.py")
            continue
        *both, kernels = page[name, backend]
        assert both[step == "backward"] == files, (name, backend, step)
        assert 2 + len(files) + 1 <= READ
        kernels = [kernel if kernel.startswith("core/") else f"{package}/{kernel}" for kernel in kernels]
        sources = [next(ROOT.glob(f"*/*/src/rl_kernels/{kernel}")) for kernel in kernels]
        for launched in path.kernels:
            # A source of CUDA, or a kernel of Triton.
            is_named = [launched == file.name or f"def {launched}(" in file.read_text("utf-8") for file in sources]
            assert any(is_named), (name, backend, launched)


def test_public_functions_have_few_keywords() -> None:
    counts = {name: keywords for name, _, keywords, _ in call_path.keywords()}
    assert max(counts.values()) <= KEYWORDS
    assert counts["linear_logp"] <= 14
