from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock, Timeout

from distillkit._utils.shares import share_of
from distillkit.locking import locked
from distillkit.privacy import (
    ADD_OR_REMOVE_CLIENT,
    ALL_CLIENTS,
    ASSUMPTIONS,
    REPLACE_RECORD,
    Account,
    Event,
    Guarantee,
    Ledger,
    NotAccountable,
    PrivacyError,
    compose,
)
from distillkit.privacy._child_ledger import ledger_lines
from distillkit.privacy._journal import LedgerWriteError
from tests.distillkit.privacy.options import write_chain
from tests.refused import refused

ONE = Event("class_means", 2.0, client=0)


def head_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def test_file_contains_the_event_when_spend_returns(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.spend()
    numbers: dict[str, Any] = {"sigma": np.float32(2), "rate": np.float32(1), "count": np.int64(1)}
    ledger.spend(replace(ONE, client="a", round=10**400, seeded=True, **numbers))
    lines = path.read_bytes().splitlines()
    first, charge = map(json.loads, lines)
    assert (first["after"], charge["after"]) == ("", sha256(lines[0]).hexdigest())
    assert ledger.head == {"lines": 2, "hash": sha256(charge["after"].encode() + lines[1]).hexdigest()}
    assert first["relation"] == "add or remove one record"
    assert charge["event"] == asdict(replace(ONE, client="a", round=10**400, seeded=True))
    assert (charge["event"]["sampling"], charge["event"]["relation"]) == ("everything", "add or remove one record")
    assert Ledger(path).events == ledger.events
    assert not path.stat().st_mode & 0o133  # nobody may execute it, others may not write
    assert repr(Ledger(path)) == f"Ledger('{path}', delta=1e-05: 1 events of 1 clients)"


def test_append_that_was_cut_at_any_byte_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path)
    ledger.spend(replace(ONE, client=1), replace(ONE, client=2, sigma=9.0))
    kept, before, head = path.read_bytes(), ledger.events, head_of(path).read_bytes()
    ledger.spend(replace(ONE, client=2, sigma=3.0, count=2), ONE)
    whole, everything, later = path.read_bytes(), ledger.events, head_of(path).read_bytes()
    for cut in range(len(kept), len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        head_of(path).write_bytes(later)
        assert Ledger(path).events == everything
        assert path.read_bytes() == whole
        if cut > len(kept):  # lines are never older than their head
            head_of(path).write_bytes(head)
            refused(lambda: Ledger(path), ValueError, "are not those of its head|lost or changed")
            path.write_bytes(whole[:cut] + b"\0\0")
            head_of(path).write_bytes(later)
            refused(lambda: Ledger(path), ValueError, "are not those of its head|damaged")
    path.write_bytes(kept)
    head_of(path).write_bytes(head)
    assert Ledger(path).events == before


HEADS = [
    b"", b"{", b"[]", b'{"lines": 0, "hash": "", "next": [3]}', b'{"lines": "0", "hash": "", "next": []}', None,
]  # fmt: skip


@pytest.mark.parametrize("lines", range(4))
@pytest.mark.parametrize("head", HEADS)
def test_missing_or_damaged_head_is_refused(head: bytes | None, lines: int, tmp_path: Path) -> None:
    """However many of the file's lines are left; the file of the first case ends within its first line."""
    path = tmp_path / "l"
    Ledger(path).spend(ONE, ONE)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:lines]) or whole[0][:-9])
    head_of(path).unlink() if head is None else head_of(path).write_bytes(head)
    for _ in range(2):
        refused(lambda: Ledger(path), ValueError, "l.head is (missing|damaged).*restore the file")


def test_a_copy_or_a_forked_process_charges_no_ledger_in_memory(tmp_path: Path) -> None:
    """The first ledger would state too little; one in a file sees the charge of a process."""
    for ledger in (Ledger(), Ledger(tmp_path / "l")):
        for copied in (copy.copy, copy.deepcopy):
            refused(partial(copied, ledger), TypeError, r"a Ledger cannot be copied or pickled: .* Ledger\(path\)")
        if (child := os.fork()) == 0:
            code = 4
            with contextlib.suppress(LedgerWriteError):
                ledger.spend()
                code = 5
                ledger.spend(ONE)
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if ledger.path else 5)
        assert len(ledger.events) == bool(ledger.path)


@pytest.mark.parametrize("call", range(14))
def test_kill_at_any_call_loses_no_charge_that_was_acknowledged(call: int, tmp_path: Path) -> None:
    """The process dies before its n-th call to write, sync or rename; two charges make 13 such calls."""
    path, told = tmp_path / "l", tmp_path / "acknowledged"
    if (child := os.fork()) == 0:
        count = itertools.count()

        def or_die(function: Any) -> Any:
            return lambda *a, **k: os._exit(9) if next(count) == call else function(*a, **k)

        for name in ("write", "fsync", "replace"):
            setattr(os, name, or_die(getattr(os, name)))
        ledger = Ledger(path)
        for _ in range(2):
            ledger.spend(ONE)
            with open(told, "a", encoding="utf-8") as file:
                file.write("1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (9 if call < 13 else 0)
    acknowledged = len(told.read_text(encoding="utf-8")) if told.exists() else 0
    assert len(Ledger(path).events) in (acknowledged, acknowledged + 1)
    Ledger(path).spend(ONE)
    assert len(Ledger(path).events) > acknowledged


def test_damaged_and_missing_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path)
    ledger.spend(ONE)
    ledger.spend(ONE)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"sigma": 2.0', '"sigma: 2.0', 1), encoding="utf-8")
    refused(lambda: Ledger(path), ValueError, "line 2 of .*/l is damaged")
    path.write_text(text[:-1], encoding="utf-8")
    refused(lambda: ledger.epsilon(), ValueError, "lost lines")
    path.write_text(text, encoding="utf-8")
    refused(lambda: ledger.spend(ONE), ValueError, "lost lines")  # also when it is back
    head_of(path).unlink()
    path.write_text('{"accuracy": 1}\n', encoding="utf-8")
    refused(lambda: Ledger(path), ValueError, "line 1 of .*/l does not .* was edited, or is no ledger")
    path.write_text("accuracy\n", encoding="utf-8")
    refused(lambda: Ledger(path), ValueError, "path must be a ledger or a new file, but .*/l holds something else")


FIRST = {"ledger": "distillkit.ledger/2", "delta": 1e-5, "budget": None, "disjoint": True, "renyi_order": None}
FIRST |= {"relation": None, "data": None}


@pytest.mark.parametrize(
    "odd",
    [
        {"accuracy": 1}, {"event": {}}, {"event": {**asdict(ONE), "sigma": -1.0}}, {"remark": "x", "from": 5},
        {"assumed": ["x"]}, {"assumed": 3, "by": "x"}, {"clients": 0}, {"clients": True},
        {"event": {**asdict(ONE), "sigma": 10**400}}, {"event": {**asdict(ONE), "count": 10**400}},
        {"ledger": "distillkit.ledger/2"}, {**FIRST, "ledger": "distillkit.ledger/1"}, FIRST,
    ],
)  # fmt: skip
def test_refused_line_stays_refused_and_later_lines_are_not_skipped(odd: dict[str, Any], tmp_path: Path) -> None:
    event = {"event": asdict(ONE)}
    first = [FIRST] if odd is FIRST else []
    write_chain(tmp_path / "l", *first, odd)
    words = rf"line {len(first) + 1} of .*l is not a line of a ledger: {re.escape(json.dumps(odd)[:80])} \("
    refused(lambda: Ledger(tmp_path / "l"), ValueError, words)
    write_chain(tmp_path / "l", event)
    ledger = Ledger(tmp_path / "l")
    write_chain(tmp_path / "l", event, odd, event)
    for use in (ledger.epsilon, ledger.epsilon, lambda: ledger.spend(ONE), lambda: Ledger(tmp_path / "l")):
        refused(use, ValueError, "line 2 of .* is not a line of a ledger: .* give the path of a ledger")
    assert len((tmp_path / "l").read_text(encoding="utf-8").splitlines()) == 3


def test_interrupted_reading_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while reading another process's lines; the next read counts all of them."""
    ledger, other = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    other.spend(ONE, replace(ONE, client=2), ONE)
    take, taken = Ledger._read_line, []

    def interrupted(self: Ledger, number: int, line: dict[str, Any]) -> None:
        taken.append(number)
        if len(taken) == 2:
            raise KeyboardInterrupt
        take(self, number, line)

    monkeypatch.setattr(Ledger, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.epsilon()
    assert ledger.events == other.events
    assert ledger.epsilon() == other.epsilon()
    assert taken == [1, 2, 2, 3, 4]


def test_threads_check_and_charge_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a file, whose lock would make them wait."""
    ledger, check = Ledger(budget=compose([(2.0, 1.0, 1)], 1e-5).epsilon), Ledger._check_budget
    monkeypatch.setattr(Ledger, "_check_budget", lambda *given: (check(*given), time.sleep(0.02)))
    with ThreadPoolExecutor(4) as pool:
        charges = [pool.submit(ledger.spend, ONE) for _ in range(4)]
    assert sum(charge.exception() is None for charge in charges) == len(ledger.events) == 1


def test_two_ledgers_and_many_threads_share_one_file(tmp_path: Path) -> None:
    first, second = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    with ThreadPoolExecutor(4) as pool:
        for ledger in (first, second):
            for client in range(4):
                pool.submit(ledger.spend, replace(ONE, client=client))
    assert first.head == second.head == Ledger(tmp_path / "l").head
    assert len(first.events) == len(second.events) == 8
    assert (first.spends(0), first.spends()) == ([(2.0, 1.0, 2)], [(2.0, 1.0, 8)])
    assert first.epsilon() == second.epsilon() == compose([(2.0, 1.0, 2)], 1e-5).epsilon


@pytest.mark.parametrize("sampling", ["shuffled", "without replacement", "everything"])
def test_unknown_sampling_is_refused(sampling: str) -> None:
    words = f"^dp_sgd: sampling '{sampling}' at rate 0.75 has no accountant here.*sampling='poisson'"
    refused(lambda: Event("dp_sgd", 1.0, 0.75, sampling=sampling), NotAccountable, words)
    words = "^dp_sgd: Poisson amplification is proved for 'add or remove one record', not for 'replace one record'"
    refused(lambda: Event("dp_sgd", 1.0, 0.75, relation=REPLACE_RECORD), NotAccountable, words)
    words = r"^dp_sgd: relation must be one of \('add.*', 'replace.*', 'add.*'\), got 'label change'"
    refused(lambda: Event("dp_sgd", 1.0, relation="label change"), NotAccountable, words)
    for relation in ("add or remove one record", ADD_OR_REMOVE_CLIENT):
        assert Event("dp_sgd", 1.0, 0.1, relation=relation).sampling == "poisson"


def test_values_of_a_wrong_type_are_refused_before_they_make_the_file_unreadable(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    calls: dict[str, Callable[[], object]] = {
        "events must be Event(mechanism, sigma, ...) objects, got str": partial(ledger.spend, "x"),
        "mechanism must be a string, got tuple": partial(replace, ONE, mechanism=("x",)),
        "round must be an integer, got str": partial(replace, ONE, round="1"),
        "seeded must be True or False, got 1": partial(replace, ONE, seeded=1),
        "clients must be an int, got bool": partial(ledger.register, True),
        "clients must be a number or a list of ids, got a string; pass ['ab']": partial(ledger.register, "ab"),
        "reason must be a string, got NoneType": partial(ledger.void, None),
        "text must be a string, got tuple": partial(ledger.add_remark, ("x",)),
        "entry must be a string, got tuple": partial(ledger.assume, ("x",), ["size"]),
        "facts must be a list of names of inputs, got str": partial(ledger.assume, "x", "size"),
        "facts must be a list of names of inputs, got int": partial(ledger.assume, "x", [1]),
        "data must be a fingerprint, got int": partial(Ledger, data=3),
        "ledger must be a Ledger, got str": partial(Account, "ledger.jsonl"),
    }
    for words, call in calls.items():
        refused(call, TypeError, f"^{re.escape(words)}$")
    refused(lambda: ledger.register(-1), ValueError, "^clients must be at least 0, got -1$")
    refused(lambda: ledger.mirror("n", [(1, {"remark": math.nan})]), ValueError, "not JSON compliant")
    for line, words in (
        ({"event": {**asdict(ONE), "more": 1}}, r"\(unknown kind of line\)$"),
        ({"event": {**asdict(ONE), "sigma": -1.0}}, r"\(sigma must be at least 0, got -1\)$"),
        ({"event": {**asdict(ONE), "mechanism": 3}}, r"\(mechanism must be a string, got int\)$"),
        ({"void": "shown"}, r"\('client'\)$"),
        ({"other": 1}, r"^not a line of a ledger: {'other': 1, 'from': \['n', \d\]} \(unknown kind of line\)$"),
    ):
        for new in ([line], [{"remark": "x"}, line]):
            refused(lambda new=new: ledger.mirror("n", list(enumerate(new, 1))), ValueError, words)
    assert ledger.mirrored("n") == 0
    assert not (tmp_path / "l").exists()
    ledger.void("")
    assert [one.guarantee().reason for one in (ledger, Ledger(tmp_path / "l"))] == ["no reason was given"] * 2


def test_client_number_and_name_denote_the_same_client_and_known_facts_are_not_written_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.spend(*(Event("class_means", 2.0, client=client) for client in (1, "1", np.int64(1))))
    assert [e.client for e in ledger.events] == ["1", "1", "1"]
    assert Event("class_means", 2.0).client == ALL_CLIENTS
    for wrong in (True, 1.0, None):
        for made in (lambda c=wrong: replace(ONE, client=c), lambda c=wrong: Account(ledger, client=c)):
            refused(made, TypeError, f"client must be an integer or a string, got {type(wrong).__name__}")
    for _ in range(2):
        ledger.add_remark("tuned")
        ledger.assume("private_histogram")
        ledger.void("shown", client=1)
        ledger.void("sent", client="1")
        ledger.register(np.int64(2))
        ledger.register(3)
        ledger.register([1, "b", "A"])
    lines = [json.loads(line) for line in (tmp_path / "l").read_text(encoding="utf-8").splitlines()]
    assert [next(iter(line)) for line in lines[:-3]] == ["ledger", *["event"] * 3, "remark", "assumed", "void"]
    assert [line["clients"] for line in lines[-3:]] == [2, 3, ["b", "A"]]
    assert ledger.guarantee(2).assumptions["private_histogram"] == ASSUMPTIONS["private_histogram"]
    ledger.spend(replace(ONE, client="A"))
    words = r"client 'x' .*the known clients are \['1', 'A', 'b'\] and 0 to 2\. .*register\(\['x'\]\)"
    for ask in (ledger.epsilon, lambda c: Account(ledger, client=c).guarantee()):
        refused(lambda ask=ask: ask("x"), PrivacyError, words)
    alone = Ledger()
    alone.spend(Event("class_means", 2.0))
    assert alone.guarantee("x") == alone.guarantee()  # everyone was charged
    alone.register(1)
    refused(lambda: alone.epsilon(1), PrivacyError, r"client '1' .* clients are \[\] and 0 to 0\. ")
    for clients in (1, 2):
        alone.register(clients)
        alone.spend(replace(ONE, client=0))
        assert ("disjoint" in alone.guarantee().assumptions["Ledger"]) == (clients > 1)
    ledger.register([f"c{k:02}" for k in range(12)])
    refused(lambda: ledger.epsilon("x"), PrivacyError, r"are \['1', 'A', 'b', 'c00', .*'c06'\] and")


def test_guarantee_as_text_and_as_values() -> None:
    facts = {"f": ("size", "clip"), "g": ("size",)}
    whole = Guarantee(1.23456, 1e-6, "r", 1.23456, "pld", remarks=("one", "two"), assumptions=facts, budget=3.5)
    assert str(whole) == (
        "epsilon 1.235 at delta 1e-06 (r), if number, sigma and rate of the releases were not chosen by looking at "
        "released values; the budget of 3.5 holds however the releases are stopped; one; two; assumes (PUBLIC_INPUTS): "
        "size, clip"
    )
    same = {"delta": 1e-6, "relation": "r", "remarks": ["one", "two"]}
    same["assumed_public"] = {"f": ["size", "clip"], "g": ["size"]}
    planned = "number, sigma and rate of the releases were not chosen by looking at released values"
    assert whole.info() == {"epsilon": 1.23456, "accountant": "pld", "valid_if": planned, "budget": 3.5, **same}
    free = replace(whole, epsilon=0.0, nominal=0.0, budget=None)
    assert str(free) == "epsilon 0 at delta 1e-06 (r); one; two"
    for nominal, shown in ((2.5, 2.5), (math.inf, None)):
        lost = replace(whole, epsilon=None, reason="raw images were sent", nominal=nominal)
        assert str(lost) == "no guarantee: raw images were sent"
        assert lost.info() == {"epsilon": None, "reason": "raw images were sent", "nominal_epsilon": shown, **same}
    ledger = Ledger(budget=25.5, disjoint=False, renyi_order=8, delta=1e-6)
    ledger.spend(ONE, replace(ONE, client=2, sigma=90.0), replace(ONE, sigma=90.0))
    ledger.void("shown", client=3)
    options = "delta=1e-06, budget=25.5, disjoint=False, renyi_order=8"
    assert repr(ledger) == f"Ledger(in memory, {options}: 3 events of 2 clients)"
    other, ledger = Ledger(), Ledger(budget=1.2)
    other.spend(replace(ONE, sigma=3.0, client=1))
    ledger.mirror("node", list(enumerate(other.extract(1), 1)))  # copies exceed the budget at the ledger's own delta
    found = ledger.guarantee(delta=1e-3)
    assert (0.83 < found.epsilon < 0.84, found.budget) == (True, None)
    empty = Ledger().guarantee()
    assert str(empty) == "epsilon 0 at delta 1e-05 (nothing spent)"
    assert repr(Ledger()) == "Ledger(in memory, delta=1e-05: nothing spent)"
    nothing = {"epsilon": 0.0, "delta": 1e-5, "relation": "", "accountant": "exact", "valid_if": planned}
    assert empty.info() == nothing


def test_charge_is_synced_under_the_lock_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "ledger.jsonl", []
    sync, write = os.fsync, os.write
    waits: list[Any] = []
    noted = lambda *given, wait, **how: waits.append(wait) or locked(*given, wait=wait, **how)  # noqa: E731
    monkeypatch.setattr("distillkit.privacy._journal.locked", noted)

    def observed(handle: int) -> None:
        with pytest.raises(Timeout):  # another process could not read or append meanwhile
            FileLock(tmp_path / "ledger.jsonl.lock").acquire(timeout=0)
        seen.append(path.read_bytes().count(b"\n") if path.exists() else 0)
        sync(handle)

    monkeypatch.setattr(os, "fsync", observed)
    monkeypatch.setattr(os, "write", lambda handle, text: write(handle, text[:9]))  # as a slow disk may do
    ledger, handles = Ledger(path), len(os.listdir("/dev/fd"))
    with share_of("over_classes"):
        refused(lambda: ledger.spend(ONE), ValueError, "over_classes cannot split .* made and charged several times")
    ledger.spend(ONE)
    assert seen == [0, 0, 2, 2]  # the head and its name, the lines, and the new file's name in its folder
    with ledger.run_lock():
        for change in (lambda: ledger.spend(ONE, ONE), lambda: ledger.void("sent"), lambda: ledger.add_remark("tuned")):
            seen.clear()
            before = path.read_bytes().count(b"\n")
            change()
            assert seen == [before, before, path.read_bytes().count(b"\n")]
    assert waits == [0.0, None, 0.0, 0.0, 0.0]  # a run waits for another one to end, a charge does not
    path.write_bytes(path.read_bytes()[:-9])
    assert len(ledger_lines(ledger)) == len(seen) + 1 == 5  # it completes the last line, which is one more call
    assert len(os.listdir("/dev/fd")) == handles
