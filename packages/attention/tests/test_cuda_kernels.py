"""Bugs planted in the kernels of ``cuda-sm90`` show on a GPU: the checker finds them, on its cases and larger ones."""

from importlib.resources import files

import pytest
import torch

from rl_kernels.attention.backends.cuda_sm90 import schedule
from rl_kernels.attention.op import OPERATOR
from rl_kernels.attention.spec.cases_dimensions import DIMENSIONS
from rl_kernels.core.calls import forget
from rl_kernels.core.cuda import launch
from rl_kernels.core.testing import Case, spec_of
from rl_kernels.core.testing.planted import Bug
from rl_kernels.lab.check.conformance import cell
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import Check

KERNELS = {
    "attention_sm90.cu": (
        Bug("a warp counts as idle unless its last row is in use", "row / 16 * 16", "row / 16 * 16 + 15"),
        Bug(
            "finish merges segments in descending order",
            "for (int i = 0; i < AHEAD; ++i) {\n            const Merge merge(",
            "for (int i = AHEAD - 1; i >= 0; --i) {\n            const Merge merge(",
        ),
    ),
    "forward.cuh": (
        Bug("out of padded queries is not zeroed", "used ? done.of(acc[i]) : 0.0f", "done.of(acc[i])"),
        Bug("the sink is read by KV head, not by query head", "[half], head", "[half], t.head"),
        Bug("q is read as if its heads were adjacent", "q_row, p.q_head", "q_row, p.size"),
    ),
    "states.cuh": (
        Bug("rescaling picks the factor by column, not by half", "shrink[i / 2 % 2]", "shrink[i % 2]"),
        Bug("a segment is added without its factor", "make_float4(low.addend(acc[4 * i])", "make_float4(acc[4 * i]"),
    ),
    "attention.cuh": (
        Bug("dropped keys are counted modulo a block, not a segment", "start % SEGMENT", "start % BLOCK"),
        Bug("the table's integer width is taken from seqused_k", "integer(TABLE, p.table", "integer(USED_K, p.table"),
    ),
    "queue.cuh": (Bug("rounds that go backwards miss one tile", "- 1 - mine :", "- mine :"),),
    "dq.cuh": (
        Bug("dq does not clear a block that lacks just one key", "PART > length", "PART > length + 1"),
        Bug("dq lacks every second block of keys", "__fadd_rn(to[0], x.x)", "to[0]"),
    ),
    "dkdv.cuh": (Bug("weights are taken in another order", "words.word[j], 4 * i + j", "words.word[j], 4 * j + i"),),
    "backward.cuh": (
        Bug("hidden scores are capped in the backward pass", "if (x == -infinity()) return 0.0f;\n    cap", "cap"),
    ),
}
"""By the file that each of them changes."""
SOURCES = {
    file.name: file.read_text(encoding="utf-8")
    for file in files(schedule.PACKAGE).iterdir()
    if file.name.endswith((".cu", ".cuh"))
}
BUGS = [(file, bug) for file, bugs in KERNELS.items() for bug in bugs]
IDS = [bug.name for _, bug in BUGS]
NARROW = 64
RELATIONS = ("accuracy", "gradients", "invariance", "hygiene")


def case(name, sizes, **options):
    names = ("batch", "queries", "keys", "kv_heads", "group", "head")
    return Case(name, dict(zip(names, sizes, strict=True)), {"return_lse": True, **options})


# More tiles than multiprocessors, segments that are merged by another kernel or in a tile, heads that fill a tile; the
# last query of a tile alone sees the first key of a block, a block lacks one key, the last query that sees a tile of
# keys begins a block.
LARGE = (
    case("tiles", (4, 300, 301, 8, 4, 64)),
    case("segments", (2, 200, 2500, 2, 4, 128)),
    case("joined", (2, 200, 1300, 10, 4, 128)),
    case("joined-of-64", (2, 300, 1300, 6, 4, 64)),
    case("packed", (9, 400, 400, 4, 7, 128), layout="packed"),
    case("first-key-of-a-block", (1, 60, 137, 2, 5, 128)),
    case("last-key-of-a-block", (2, 70, 127, 2, 4, 64)),
    case("first-query-of-a-block", (1, 300, 300, 2, 4, 64), window=(65, 0)),
    case("window", (2, 300, 1500, 2, 3, 80), window=(1100, 0), softcap=3.0, sinks=True),
    case("wide-joined", (1, 300, 2500, 24, 4, 256), rising=True),
    case("wide-keys-joined", (1, 200, 2500, 80, 1, 192), value_head=128),
)


def clear():
    for cached in (schedule.program, schedule.backward_program):
        cached.cache_clear()
    forget()


@pytest.fixture
def build(make_kernels, cubins, monkeypatch):
    """Return a function that makes the backend run changed copies of its kernels."""

    def changed(file=None, bug=None):
        texts = {name: text.replace(bug.old, bug.new) if name == file else text for name, text in SOURCES.items()}
        make_kernels("planted_sm90", **{name.replace(".", "__"): text for name, text in texts.items()})
        monkeypatch.setattr(schedule, "PACKAGE", "planted_sm90")
        monkeypatch.setattr(launch, "_kernels", {})
        monkeypatch.setattr(launch, "_modules", {})
        clear()

    yield changed
    clear()


def shown():
    """Return the case, relation and message of the first check that fails; None if all pass."""
    named = [one for one in spec_of(OPERATOR).cases if one not in DIMENSIONS and one.dtype in ("", "bf16")]
    # Those of one program after the other: most of the time goes into compiling them.
    for one in sorted((*named, *LARGE), key=lambda one: ("softcap" in one.options, one.sizes["head"] > NARROW)):
        for relation in RELATIONS:
            for found in check_relation(cell(OPERATOR, one, "bf16", "cuda-sm90"), relation):
                if isinstance(found, Check) and not found.passed:
                    assert "CompileError" not in found.comparison.message
                    return one.name, relation, found.comparison.message
    return None


@pytest.mark.parametrize(("file", "bug"), BUGS, ids=IDS)
def test_a_bug_changes_one_place(file, bug):
    assert SOURCES[file].count(bug.old) == 1
    assert bug.old != bug.new


@pytest.fixture
def hopper():
    reason = OPERATOR.backend("cuda-sm90").why_not(OPERATOR.describe(torch.zeros(1, 1, 1, 8).bfloat16().cuda()))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_nothing_shows_without_a_bug():
    assert shown() is None


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("file", "bug"), BUGS, ids=IDS)
def test_planted_bugs_show(build, file, bug):
    build(file, bug)
    assert shown() is not None
