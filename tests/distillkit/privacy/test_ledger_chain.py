"""The ledger's file is a hash chain with pinned options, and names must be known."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from distillkit.privacy import ADD_OR_REMOVE_CLIENT, REPLACE_RECORD, Event, Ledger, NotAccountable, PrivacyError
from tests.refused import refused

ONE = Event("class_means", 2.0, client="a")


def charged(path: Path, count: int = 5) -> Ledger:
    ledger = Ledger(path, budget=50.0)
    for round in range(count):
        ledger.spend(replace(ONE, round=round, sigma=5.0 + round))
    return ledger


CHANGES: dict[str, Callable[[list[str], int], list[str]]] = {
    "edited": lambda lines, n: [*lines[:n], re.sub('"(sigma|delta)": ', '"\\1": 1', lines[n]), *lines[n + 1 :]],
    "moved": lambda lines, n: [*lines[: min(n, 4)], *lines[min(n, 4) :][1::-1], *lines[min(n, 4) + 2 :]],
    "removed": lambda lines, n: lines[:n] + lines[n + 1 :],
    "repeated": lambda lines, n: lines[: n + 1] + lines[n:],
    "cut": lambda lines, n: lines[:n],
    "padded": lambda lines, n: [*lines[:n], lines[n][:-1] + " \n", *lines[n + 1 :]],
    "spaced": lambda lines, n: [*lines[:n], "\n", *lines[n:]],
}
"""Ways to change a file's lines, of which the n-th is chosen."""


@pytest.mark.parametrize("name", [*CHANGES, "deleted"])
@pytest.mark.parametrize("number", range(6))
def test_changed_file_is_refused(name: str, number: int, tmp_path: Path) -> None:
    path, ledger = tmp_path / "l", charged(tmp_path / "l")
    events, lines = ledger.events, path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.unlink()
    if name != "deleted":
        path.write_text("".join(CHANGES[name](lines, number)), encoding="utf-8")
    if name in ("removed", "cut", "deleted"):
        refused(ledger.epsilon, ValueError, "l lost lines since it was read, .*: restore the file$")
    if number == 5 and name in ("removed", "cut"):  # the head has the last lines, too
        assert Ledger(path).events == events
        return
    words = {"repeated": f"line {number + 2} of .* does not follow", "spaced": "is damaged|holds something else"}
    words |= dict.fromkeys(("cut", "deleted"), "l lost or changed some of its first 5 lines")
    for _ in range(2):
        refused(lambda: Ledger(path).epsilon(), ValueError, words.get(name, "edited|not those of its head"))


def test_any_changed_byte_is_refused(tmp_path: Path) -> None:
    """A byte of the last line is found by the file beside the ledger, every other byte by the chain too."""
    charged(tmp_path / "l")
    whole, draws = (tmp_path / "l").read_bytes(), random.Random(0)
    for place in draws.sample(range(len(whole) - 1), 200):
        other = bytes([whole[place] ^ (1 << draws.randrange(8))])
        (tmp_path / "l").write_bytes(whole[:place] + other + whole[place + 1 :])
        refused(lambda: Ledger(tmp_path / "l"), ValueError, "restore the file|holds something else")


def test_head_detects_changes_of_a_rewritten_chain(tmp_path: Path) -> None:
    """Whoever writes the whole file again cannot match a head that was kept elsewhere."""
    ledger = charged(tmp_path / "l")
    head = ledger.head
    Ledger(tmp_path / "l").require_head({"lines": 0, "hash": ""})
    ledger.spend(ONE)
    Ledger(tmp_path / "l").require_head(head)
    (tmp_path / "l").unlink()
    (tmp_path / "l.head").unlink()
    fresh = charged(tmp_path / "l", 4)
    words = rf"l is not the one that had 6 lines with the hash {head['hash'][:8]}\.\.\.: it was cut, edited or replaced"
    refused(lambda: fresh.require_head(head), ValueError, words)
    fresh.spend(replace(ONE, sigma=4.0), ONE)
    refused(lambda: fresh.require_head(head), ValueError, "is not the one that had 6 lines")
    for lines in (10**9, -1, 7.0, "7", None):
        refused(lambda n=lines: fresh.require_head({**fresh.head, "lines": n}), ValueError, f"had {lines} lines")


@pytest.mark.parametrize(
    ("name", "given", "other"),
    [
        ("delta", 1e-6, 1e-5), ("delta", np.float32(0.25), 1e-5), ("budget", 3.0, 4.0),
        ("disjoint", False, True), ("disjoint", True, False), ("data", "abc", "abd"),
        ("relation", "replace one record", "add or remove one record"), ("renyi_order", 4.0, 5.0),
    ],
)  # fmt: skip
def test_options_are_pinned(name: str, given: Any, other: Any, tmp_path: Path) -> None:
    event = replace(ONE, relation=given) if name == "relation" else ONE
    late = Ledger(tmp_path / "l", **{name: other})
    Ledger(tmp_path / "l", **{name: given}).spend(event)
    assert json.loads((tmp_path / "l").read_text(encoding="utf-8").splitlines()[0])[name] == given
    for options in ({}, {name: given}):
        assert getattr(Ledger(tmp_path / "l", **options), name) == given
    words = rf"^{name} must be that of the ledger .*l, .*{given}.*, got .*{other}.*: leave {name} out"
    for use in (late.epsilon, lambda: late.spend(event), lambda: Ledger(tmp_path / "l", **{name: other})):
        refused(use, PrivacyError, words)
    Ledger(tmp_path / "plain").spend(ONE)
    if name in ("budget", "data", "renyi_order"):
        with pytest.raises(PrivacyError, match=f"{name} must be that of the ledger .*None"):
            Ledger(tmp_path / "plain", **{name: given})


def test_given_relation_is_the_only_one(tmp_path: Path) -> None:
    ledger, other = Ledger(tmp_path / "l", relation=REPLACE_RECORD), replace(ONE, relation=ADD_OR_REMOVE_CLIENT)
    words = "^class_means is private under 'add or remove one {}', but the ledger is for '{} one record'.*two ledgers$"
    refused(lambda: ledger.spend(ONE), NotAccountable, words.format("record", "replace"))
    for call in (lambda: Ledger().spend(ONE, other), lambda: charged(tmp_path / "n").spend(other)):
        refused(call, NotAccountable, words.format("client", "add or remove"))
    ledger.spend()
    assert not (tmp_path / "l").exists()
    refused(lambda: Ledger(relation="label change"), NotAccountable, "^relation must be one of")
    Ledger(tmp_path / "m").register(2)
    assert Ledger(tmp_path / "m", relation=REPLACE_RECORD).relation == REPLACE_RECORD
    Ledger(tmp_path / "h", relation=REPLACE_RECORD).charge_history(SimpleNamespace(history=[(1.0, 1.0, 3)]))
    found = Ledger(tmp_path / "h").guarantee()  # charged in spite of the relation, since it is spent
    assert found.relation == REPLACE_RECORD
    assert found.reason.startswith("releases are charged under add or remove one record and under replace one record")


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_failed_write_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves half a line, which is taken back; if that fails, too, the charge counts."""
    ledger = charged(tmp_path / "l", 1)
    write = ledger._journal._write

    def half(text: bytes) -> None:
        write(text[: len(text) // 2])
        full()

    monkeypatch.setattr(ledger._journal, "_write", half)
    words = "^cannot write the ledger .*l: No space left on device; nothing was released"
    refused(lambda: ledger.spend(ONE), OSError, words)
    assert [e.sigma for e in Ledger(tmp_path / "l").events] == [5.0]
    monkeypatch.setattr(os, "truncate", full)
    refused(lambda: ledger.spend(replace(ONE, sigma=6.0)), OSError, "No space")
    monkeypatch.undo()
    ledger.spend(replace(ONE, sigma=7.0))
    assert ledger.epsilon() == Ledger(tmp_path / "l").epsilon()
    assert [e.sigma for e in Ledger(tmp_path / "l").events] == [5.0, 6.0, 7.0] == [e.sigma for e in ledger.events]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_lines_that_were_read_before_an_error_are_read_again(
    error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The charges of others were lost to a process that could not complete an interrupted one."""
    path = tmp_path / "l"
    reader, writer = charged(path, 1), Ledger(path)
    for sigma in (2.0, 3.0):
        writer.spend(replace(ONE, sigma=sigma))
    path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.setattr(reader._journal, "_write", Mock(side_effect=error("stopped")))
    for _ in range(2):
        refused(reader.epsilon, error, "stopped")
    monkeypatch.undo()
    assert [e.sigma for e in reader.events] == [5.0, 2.0, 3.0]
    assert reader.epsilon() == Ledger(path).epsilon()


def test_first_charge_that_cannot_be_written_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "l")
    monkeypatch.setattr(ledger._journal, "_write", full)
    refused(lambda: ledger.spend(ONE), OSError, "nothing was released")
    monkeypatch.setattr(ledger._journal, "_write", Mock(side_effect=OSError("stopped")))
    refused(lambda: ledger.spend(ONE), OSError, "^cannot write the ledger .*l: stopped; nothing was released$")
    monkeypatch.undo()
    assert ledger.events == Ledger(tmp_path / "l").events == ()
