"""The loopback's pool of processes: acquiring, releasing, and processes that fail to start or stop."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fl.deploy.loopback import _processes
from fl.deploy.loopback._processes import Process, ProcessEnded, acquire, pickle_config, release


class FakeProcess:
    """Fake process: returns given replies and records what it was sent."""

    def __init__(self, *says: Any, parent: int | None = None) -> None:
        self.says, self.sent, self.ended = list(says), list[Any](), False
        self.parent = os.getpid() if parent is None else parent

    def send(self, *frame: Any) -> None:
        self.sent.append(frame[0])

    def receive(self, patience: float | None = None) -> Any:
        said = self.says.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said

    def end(self) -> str:
        self.ended = True
        return "it was ended"


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    kept: list[Any] = []
    monkeypatch.setattr(_processes, "_IDLE", kept)
    return kept


def test_dead_processes_and_those_of_the_parent_are_skipped(idle: list[Any]) -> None:
    living, dead, others = (
        FakeProcess(("open",)),
        FakeProcess(ProcessEnded("dead")),
        FakeProcess(("open",), parent=os.getpid() + 1),
    )
    idle.extend([living, dead, others])
    assert acquire(b"") is living
    assert (living.sent, dead.sent, others.sent, idle) == (["open"], ["open"], [], [])


def test_process_that_fails_to_start_explains_what_a_script_must_do(
    idle: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeProcess] = []

    def failing() -> FakeProcess:
        made.append(FakeProcess(ProcessEnded("the process in which it ran died (exit code 1)")))
        return made[-1]

    monkeypatch.setattr(_processes, "Process", failing)
    idle.append(FakeProcess(ProcessEnded("dead")))
    with pytest.raises(RuntimeError, match=r"did not start: .*exit code 1.* under `if __name__ == '__main__':`"):
        acquire(b"")
    assert len(made) == 1  # it is not tried for ever


@pytest.mark.parametrize("of", [acquire, release], ids=["taken", "given back"])
def test_interrupt_ends_the_process_and_keeps_none(
    of: Callable[..., Any], idle: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = FakeProcess(KeyboardInterrupt())
    monkeypatch.setattr(_processes, "Process", lambda: process)
    with pytest.raises(KeyboardInterrupt):
        of(process if of is release else b"")
    assert process.ended
    assert idle == []


def test_only_processes_that_settle_are_idle(idle: list[Any]) -> None:
    release(dead := FakeProcess(ProcessEnded("dead")))  # type: ignore[arg-type]
    assert (dead.sent, idle) == (["stop", "close"], [])
    release(process := FakeProcess(("answer", 1), ("closed",)))  # type: ignore[arg-type]
    assert idle == [process]


@pytest.mark.parametrize("alive", [False, True])
def test_silence_and_a_closed_pipe_end_the_process_with_the_reason(alive: bool) -> None:
    class Child:
        exitcode = -9

        def __init__(self) -> None:
            self.killed = False

        def is_alive(self) -> bool:
            return alive and not self.killed

        def join(self, seconds: float | None = None) -> None:
            assert seconds is not None or self.killed  # nobody waits for ever for the living

        def kill(self) -> None:
            self.killed = True

    for silent in (True, False):
        ours, theirs = multiprocessing.Pipe()
        process = Process.__new__(Process)
        vars(process).update(connection=ours, parent=os.getpid(), _process=Child())
        if not silent:
            theirs.close()
        wanted = "did not stop, and was killed" if alive else r"died \(exit code -9\)"
        with pytest.raises(ProcessEnded, match=wanted):
            process.receive(0.01)
        assert ours.closed
        with pytest.raises(ProcessEnded, match=r"died \(exit code -9\)"):  # by now it is dead
            process.send("open")


def test_object_that_cannot_be_pickled_is_named_by_its_path() -> None:
    def opening(held: Any) -> Any:
        return SimpleNamespace(method=SimpleNamespace(parts=held))

    bad = lambda: None  # noqa: E731
    for held, way in [([1, bad], r"parts\[1\]"), (({"a": (bad,)},), r"parts\[0\]\['a'\]\[0\]")]:
        with pytest.raises(TypeError, match=rf"SimpleNamespace\.{way}\. Use a function"):
            pickle_config(opening(held))
    deep: Any = bad
    for _ in range(40):
        deep = [deep]
    with pytest.raises(TypeError, match=r"the method holds it as SimpleNamespace\.parts(\[0\]){7}\. Use"):
        pickle_config(opening(deep))
