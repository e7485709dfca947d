"""The list of planted mistakes is current: each correct text stands exactly once in its file, and its tests exist."""

from __future__ import annotations

from tests.mutants import ROOT, is_current, read_list


def test_every_planted_mistake_can_be_planted() -> None:
    mutants = read_list([])
    assert len(mutants) > 300
    assert [name for name, mutant in mutants.items() if not is_current(mutant)] == []
    assert {
        path for mutant in mutants.values() for path in mutant["tests"] if not (ROOT / path.split("::")[0]).exists()
    } == set()
