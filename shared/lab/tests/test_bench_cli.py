"""``rl-kernels bench``: arguments, exit status, records and tables, on a toy operator."""

import gc
import json
import weakref
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from rl_kernels.core.dispatch import choose
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.testing import Case
from rl_kernels.lab.bench import cli, runner
from rl_kernels.lab.bench.definition import GOALS, SMALL, Benchmark, Peer, Shape, Work, forward_and_backward, plain
from rl_kernels.lab.bench.measure import EVENTS, GRAPH, Clock, Measurement
from rl_kernels.lab.bench.record import read
from rl_kernels.lab.check.rows import RowLayout


def double(x, *, backend=None):
    choose(OPERATOR, Call.of(x), backend)
    return double.factor * x


ROWS = RowLayout({"x": 1}, frozenset({"output", "gradient:x"}))


def absent():
    import no_such_peer

    return no_such_peer


def raising(x):
    raise ValueError("only even widths\nand a long story")


def overwriting(x):
    found = 2 * x
    x.detach().zero_()
    return found


PEERS = {
    "eager": plain(lambda x: x + x, "plain"),
    "absent": Peer(absent, "no-such-peer"),
    "raising": plain(raising),
    "lying": plain(lambda x: 3 * x),
    "nan": plain(lambda x: x * torch.nan),
    "summed": Peer(lambda: lambda x: (2 * x).sum(), scalar=True, passes=("forward + backward",)),
    "floor": Peer(lambda: torch.clone, checked=False, passes=("forward",)),
    "overwriting": Peer(lambda: overwriting, overwrites=True),
    "slow": plain(lambda x: x * 2),
}
SHAPES = (Shape((8, 16), without=frozenset({"slow"}), group="small"), Shape((3, 5), note="ragged", group="small"))


def passes(shape, itemsize):
    case = Case(shape.label, dict(zip(("batch", "width"), shape.sizes, strict=True)))
    size = shape.sizes[0] * shape.sizes[1] * itemsize
    return forward_and_backward(case, Work(2 * size), Work(4 * size, 1.0))


BENCH = Benchmark(("N", "D"), {GOALS: SHAPES, SMALL: SHAPES}, passes, PEERS, {"": ROWS})
BACKENDS = (
    Backend("cuda-sm90", "toy_pkg.cuda", {"cuda": INVARIANT}),
    Backend("native", "toy_pkg.native", {"cpu": INVARIANT}),
)
OPERATOR = Operator(
    "double", "toy_pkg", "twice", ("N", "D"), frozenset({"N"}), {}, {}, BACKENDS, lambda x, **_: Call.of(x)
)


@pytest.fixture(autouse=True)
def toy(install, doubled, make_module, monkeypatch):
    install(cli, OPERATOR, replace(doubled, unread=frozenset({"backend"})), double=double)
    monkeypatch.setattr(double, "factor", 2.0, raising=False)
    monkeypatch.setattr(cli, "ceilings", lambda device, dtype: CEILINGS)
    return make_module("toy_pkg.spec.bench", BENCH=BENCH)


CEILINGS = cli.ceilings(torch.device("cpu"), "fp32")


@pytest.fixture
def bench(tmp_path):
    """Return ``bench(*arguments)``: the exit status and the records by implementation and shape."""

    def run(*arguments):
        file = tmp_path / "bench.json"
        status = cli.main(["--device", "cpu", "--iters", "1", "--json", str(file), *arguments])
        json.loads(file.read_text(), parse_constant=pytest.fail)
        return status, {(each.implementation, each.shape): each for each in read(file).records}

    return run


def test_every_pass_has_a_time_a_rate_and_ratios(bench, capsys):
    status, records = bench("--compare", "eager,slow")
    assert status == 0
    assert set(records) == {
        (name, shape) for name in ("rl-kernels", "eager", "slow") for shape in ("8x16", "3x5 ragged")
    }
    ours, eager = records["rl-kernels", "8x16"], records["eager", "8x16"]
    assert ours.backend == "native"
    assert list(ours.passes) == ["forward", "forward + backward"]
    for name, measured in eager.passes.items():
        mine = ours.passes[name]
        assert measured.timing.ms > 0
        assert measured.timing.extra_mib is None
        assert measured.unit == "TB/s"
        assert measured.ratio == pytest.approx(mine.timing.ms / measured.timing.ms)
        assert measured.call_ratio > 0
        assert mine.ratio is None
        floor = (2 if name == "forward" else 4) * 8 * 16 * 4 / CEILINGS.bytes_per_s
        assert mine.share == pytest.approx(floor / (mine.timing.ms * 1e-3))
    out, err = capsys.readouterr()
    assert "geometric means" in out
    assert not err


def test_a_peer_of_one_dtype_is_left_out_for_others_unless_named(bench, toy, monkeypatch):
    peers = {"eager": PEERS["eager"], "fp32 alone": plain(lambda x: 2 * x)}
    peers["fp32 alone"] = replace(peers["fp32 alone"], dtypes=("fp32",))
    monkeypatch.setattr(toy, "BENCH", replace(BENCH, peers=peers))

    def timed(*arguments):
        return {name for name, _ in bench("--shapes", "3x5", *arguments)[1]} - {"rl-kernels", "eager"}

    assert timed("--dtype", "fp32") == {"fp32 alone"}
    assert timed("--dtype", "bf16") == set()
    assert timed("--dtype", "bf16", "--compare", "fp32 alone") == {"fp32 alone"}


@pytest.mark.parametrize("how", [GRAPH, EVENTS])
def test_a_peer_takes_turns_with_our_graph_of_the_same_pass(bench, monkeypatch, how):
    measure, clocks, turns = runner.measure, [], []

    def played(runs, device, effort, *, captured=True, beside=None):
        timing, result, *_ = measure(runs, device, effort)
        turns.append(beside)
        clocks.append(Clock(runs[0], 1, runs[0], how))
        return Measurement(replace(timing, beside_ms=None if beside is None else 1e6), result, runs, clocks[-1])

    monkeypatch.setattr(runner, "measure", played)
    _, records = bench("--compare", "eager,slow")
    # Of each shape ours first, forward and backward, then the same of each peer.
    own = [clocks[place : place + 2] if how == GRAPH else [None, None] for place in (0, 6)]
    assert turns == [None, None, *own[0], *own[0], None, None, *own[1], *own[1]]
    for measured in records["eager", "8x16"].passes.values():
        assert (measured.ratio > 1e3) == (how == GRAPH)


def test_what_is_timed_is_the_call_that_a_user_makes():
    """Looking a function up and making its groups took a host longer than the call."""

    class Options(NamedTuple):
        scale: float = 1.0

    def scaled(x, *, options=None, backend=None, validate=True):
        return x, options, backend, validate

    ours = runner.Ours(scaled, {"options": Options}, {"backend": "native", "validate": False})
    call = ours.bind({"x": 2, "scale": 3.0})
    assert call.func is scaled
    assert call.keywords["options"] is ours.bind({"x": 5, "scale": 3.0}).keywords["options"]
    assert call() == ours(x=2, scale=3.0) == (2, Options(3.0), "native", False)
    assert ours(x=2, validate=True) == (2, None, "native", True)


def test_a_round_is_gone_when_it_is_over(bench, monkeypatch):
    rounds = []
    made = runner.Round

    def kept(*args, **kwargs):
        found = made(*args, **kwargs)
        rounds.append(weakref.ref(found))
        return found

    monkeypatch.setattr(runner, "Round", kept)
    gc.disable()
    try:
        bench("--compare", "eager,slow")
        assert [found() for found in rounds] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("right_calls", [0, 3])
def test_a_result_that_is_or_goes_wrong_has_no_speed(right_calls, bench, capsys, make_module):
    calls = []

    def tiring(x, *, backend=None):
        choose(OPERATOR, Call.of(x), backend)
        calls.append(x)
        return (2 if len(calls) <= right_calls else 5) * x

    make_module("toy_pkg", double=tiring)
    status, records = bench("--shapes", "8x16")
    assert status == 1
    assert set(records) == {("rl-kernels", "8x16")}
    assert not records["rl-kernels", "8x16"].passes
    said = "WRONG, no speed: double 8x16 fp32 (rl-kernels native): output: outside the contract's fence"
    assert said in capsys.readouterr().out


def test_ours_that_raises_is_named_and_the_others_go_on(bench, make_module):
    def picky(x, *, backend=None):
        if len(x) == 8:
            raise RuntimeError("no eights")
        return 2 * x

    make_module("toy_pkg", double=picky)
    status, records = bench("--compare", "eager")
    assert status == 1
    assert records["rl-kernels", "8x16"].wrong == "RuntimeError: no eights"
    assert ("eager", "8x16") not in records
    assert records["eager", "3x5 ragged"].passes


SKIPPED = {
    "absent": "no_such_peer is not installed: pip install no-such-peer",
    "raising": "ValueError: only even widths",
    "lying": "differs from ours by 0.5 of its norm",
    "nan": "differs from ours by inf of its norm",
}


def test_a_peer_that_cannot_is_named_and_skipped(bench, capsys):
    status, records = bench("--compare", ",".join(SKIPPED))
    assert status == 0
    assert records["rl-kernels", "8x16"].passes
    out = capsys.readouterr().out
    for peer, reason in SKIPPED.items():
        record = records[peer, "8x16"]
        assert not record.passes
        assert any(reason in found for found in record.skipped.values())
        assert reason in out


def test_peers_of_other_kinds(bench):
    _, records = bench("--compare", "summed,floor,overwriting,slow")
    assert list(records["summed", "8x16"].passes) == ["forward + backward"]
    assert list(records["floor", "8x16"].passes) == ["forward"]
    assert not records["floor", "8x16"].checked
    # What overwrites its inputs spoils nobody else's.
    assert len(records["overwriting", "8x16"].passes) == len(records["slow", "8x16"].passes) == 2


def test_ids_are_not_checked_where_that_can_be_left_out(bench, doubled, make_module):
    asked = []

    def checking(x, *, validate=True, backend=None):
        asked.append(validate)
        return 2 * x

    make_module("toy_pkg", double=checking)
    make_module("toy_pkg.spec.cases", SPEC=replace(doubled, unread=frozenset({"backend", "validate"})))
    bench("--compare", "none")
    assert set(asked) == {False}


def test_what_a_shape_leaves_out_and_another_backend_of_ours_run_if_they_are_asked_for(bench):
    _, by_default = bench()
    assert ("slow", "8x16") not in by_default
    assert ("slow", "3x5 ragged") in by_default
    _, records = bench("--compare", "all,native")
    assert {*records} == {*by_default, ("native", "8x16"), ("native", "3x5 ragged")}
    native = records["native", "8x16"]
    assert native.note == "rl-kernels, backend native"
    assert all(each.ratio > 0 for each in native.passes.values())


def test_shapes_and_markdown(bench, capsys):
    _, records = bench("--op", "double", "--shapes", "2x3,4x5", "--compare", "eager", "--format", "md", "--warmup", "0")
    assert {shape for _, shape in records} == {"2x3", "4x5"}
    out = capsys.readouterr().out
    assert out.startswith("double, fp32, forward\n\n| shape | implementation | ms |")
    assert "\n\ndouble, fp32, forward + backward\n\n| shape |" in out
    assert "| 2x3 | eager |" in out
    assert "- ceilings, fp32:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iters", "0"], "argument --iters: expected an integer >= 1, got '0'"),
        (["--warmup", "-1"], "argument --warmup: expected an integer >= 0, got '-1'"),
        (["--shapes", "8"], "--shapes: expected NxD, sizes >= 1, got '8'"),
        (["--shapes", "8x0"], "--shapes: expected NxD, sizes >= 1, got '8x0'"),
        (["--shapes", "8x8,"], "--shapes: expected NxD, sizes >= 1, got ''"),
        (["--shapes", "8x8", "--set", "goals"], "--shapes: give one operator with --op, and no --set"),
        (["--op", "triple"], "unknown operator 'triple'; installed: double"),
        (["--compare", "eager,no"], "--compare: expected names among all, eager, absent, raising"),
        (["--set", "no"], "double: --set: expected one of goals, small, got 'no'"),
        (["--backend", "no"], "double: --backend: double has no backend 'no'; it has: auto, cuda-sm90, native"),
        (["--backend", "cuda-sm90"], "double: --backend cuda-sm90: runs on cuda, but the tensors are on cpu"),
        (["--json", "no/such/file.json"], "argument --json: expected a file that can be written"),
        (["--plot", "no/such/file.png"], "argument --plot: expected a file that can be written"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_timed(arguments, message, refused, monkeypatch):
    monkeypatch.setattr(cli, "run", lambda *_: pytest.fail("timed"))
    line = refused(cli.main, ["--device", "cpu", *arguments])
    assert line.startswith("rl-kernels bench: ")
    assert message in line


def test_without_a_gpu_or_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "rl-kernels bench: --device: this PyTorch sees no GPU\n"
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["--plot", str(tmp_path / "a.png")])
    assert capsys.readouterr().err.endswith("matplotlib is not installed: pip install matplotlib\n")


def test_plot(bench, tmp_path):
    pytest.importorskip("matplotlib")
    bench("--compare", "eager", "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_peer_s_environment_is_set_before_anything_runs(bench, toy, monkeypatch):
    monkeypatch.delenv("TOY_WORKSPACE", raising=False)
    starved = Peer(lambda: lambda x: 2 * x, environment={"TOY_WORKSPACE": "1"})
    toy.BENCH = replace(BENCH, peers={"starved": starved})
    monkeypatch.setattr(cli.os, "environ", dict(cli.os.environ))
    bench("--compare", "none")
    assert "TOY_WORKSPACE" not in cli.os.environ
    bench("--compare", "starved")
    assert cli.os.environ["TOY_WORKSPACE"] == "1"


def test_progress_and_prints_of_a_peer_go_to_stderr(bench, toy, capsys):
    toy.BENCH = replace(BENCH, peers={"loud": plain(lambda x: print("LOUD") or 2 * x)})
    bench()
    out, err = capsys.readouterr()
    assert "LOUD" not in out
    assert "LOUD" in err
