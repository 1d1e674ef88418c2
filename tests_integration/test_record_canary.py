"""Records of canaries: what the doctor prints goes into the packages, unless two machines of one kind differ."""

import json

import pytest
from forked import imported

from rl_kernels.core.operator import Operator
from rl_kernels.core.registry import kernel_registry

record_canary = imported("record_canary")


def test_every_operator_has_one():
    assert [name for name in kernel_registry.names() if not kernel_registry.load(name).canary] == []


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "canary.json").write_text(json.dumps({"sm80": {"triton": {}}}), encoding="utf-8")
    toy = Operator("toy", "toy", "", (), frozenset(), {}, {}, (), lambda: None)
    monkeypatch.setattr(record_canary.kernel_registry, "load", lambda name: toy)
    monkeypatch.setattr(record_canary, "file_of", lambda canary: tmp_path / "canary.json")
    return tmp_path


def written(folder, *digests):
    made = []
    for number, digest in enumerate(digests):
        made.append(folder / f"{number}.json")
        one = {"bf16": {"forward": digest, "backward": "b"}}
        bits = {"sm90": {"toy": {"triton": one, "native": one}}}
        made[-1].write_text(json.dumps(bits), encoding="utf-8")
    return [str(file) for file in made]


def test_records_are_added_to_the_package(package):
    assert record_canary.main(written(package, "a", "a")) == 0
    known = json.loads((package / "canary.json").read_text(encoding="utf-8"))
    # Those of native are PyTorch's.
    assert known == {"sm80": {"triton": {}}, "sm90": {"triton": {"bf16": {"forward": "a", "backward": "b"}}}}


def test_machines_that_differ_are_refused(package, capsys):
    before = (package / "canary.json").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        record_canary.main(written(package, "a", "c"))
    assert "triton of toy on sm90: the files have different bits" in capsys.readouterr().err
    assert (package / "canary.json").read_text(encoding="utf-8") == before
