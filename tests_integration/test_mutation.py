"""The list of equivalent mutants is of edits that the sources have."""

import json

from forked import imported

from rl_kernels.lab.mutate.edits import edits_of


def test_each_equivalent_mutant_is_an_edit_of_the_sources():
    tool = imported("mutation")
    files = tool.modules()
    for entry in json.loads(tool.EQUIVALENT.read_text(encoding="utf-8")):
        source = files[entry["module"]].read_text(encoding="utf-8")
        lines = source.splitlines()
        edits = [edit for edit in edits_of(source) if lines[edit.line - 1].strip() == entry["code"]]
        form = entry["kind"], entry["old"], entry["new"]
        assert form in [(edit.kind, edit.old, edit.new) for edit in edits], entry
        assert entry["why"], entry
