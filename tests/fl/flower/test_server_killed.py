"""Server killed after every step of a round over an in-memory grid: the resumed run is bitwise equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fl import FedAvg, Run
from fl.addons import SCAFFOLD, Anchors
from fl.engine import _evaluation
from fl.engine import store as stores
from fl.engine._exchange import Exchanger
from fl.engine._rounds import RoundRunner
from fl.engine.store import Store
from tests.fl.flower import fake_flower
from tests.fl.flower.test_runs import FAST, assert_equal, grid, run_in_threads, run_on_grid

OPTIONS: dict[str, Any] = {"participation": 2, "evaluate": "all", "rounds": 3}
SETUP = (
    "0 told query.node", "0 heard query.node", "0 wrote config.json", "0 wrote history.jsonl",
    "0 told query.job", "0 heard query.job", "0 answered",
)  # fmt: skip
ROUND = (
    "2 began", "2 told train.job", "2 heard train.job", "2 received", "2 tested", "2 told query.job",
    "2 heard query.job", "2 appended history.jsonl", "2 wrote server", "2 wrote model", "2 appended clients.jsonl",
    "2 wrote manifest.previous.json", "2 wrote manifest.json", "2 settled", "2 row told",
)  # fmt: skip
"""Events before the first round, and in a later round, in order."""
STEPS = {"0": SETUP, "2": ROUND}


class Killed(BaseException):
    pass


def made() -> FedAvg:
    """Return a method with a query before round 1, client memories and a cached payload."""
    return FedAvg(SCAFFOLD(), Anchors(ipc=1, selected=(2,), steps=1, init="statistics"), **FAST)


class Watched(fake_flower.Grid):
    def __init__(self, there: fake_flower.Grid, happened: Callable[[str], None]) -> None:
        super().__init__(there.app, there.nodes)
        self.happened = happened

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        sent = list(messages)
        given = super().push_messages(sent)
        self.happened(f"told {sent[0].metadata.message_type}")
        return given

    def _do(self, name: str, message: Any) -> None:
        super()._do(name, message)
        self.happened(f"heard {message.metadata.message_type}")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[str], None]], Run]:
    """Return a function that runs in `tmp_path` and reports every event."""

    def after(owner: Any, name: str, said: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def both(*given: Any, **more: Any) -> Any:
            found = original(*given, **more)
            told(said(*given))
            return found

        monkeypatch.setattr(owner, name, both)

    listeners: list[Callable[[str], None]] = []
    at = [0]

    def told(what: str) -> None:
        for listener in listeners:
            listener(f"{at[0]} {what}")

    def begins(engine: RoundRunner, number: int, *more: Any, **options: Any) -> Any:
        at[0] = number
        told("began")
        return plays(engine, number, *more, **options)

    plays = RoundRunner.run_round
    monkeypatch.setattr(RoundRunner, "run_round", begins)
    file = lambda path: path.name.split(".")[0] if "safe" in path.name else path.name  # noqa: E731
    after(stores, "write_atomically", lambda path, _: f"wrote {file(path)}")
    after(Store, "_append", lambda _, path, __: f"appended {path.name}")
    after(FedAvg, "receive_answers", lambda *_: "answered")
    after(FedAvg, "receive", lambda *_: "received")
    after(_evaluation, "evaluate_global", lambda *_: "tested")
    after(Exchanger, "commit", lambda *_: "settled")

    def run(listener: Callable[[str], None]) -> Run:
        listeners[:], at[0] = [listener], 0
        there = Watched(grid(made(), tmp_path / "nodes"), told)
        return run_on_grid(
            there, made(), out=tmp_path / "run", resume=True, on_round=lambda _: told("row told"), **OPTIONS
        )  # fmt: skip

    return run


@cache
def whole() -> Run:
    return run_in_threads(made(), **OPTIONS)


def test_steps_are_complete(watch: Callable[[Callable[[str], None]], Run]) -> None:
    seen, wanted = list[str](), whole()
    assert_equal(watch(seen.append), wanted)
    assert tuple(dict.fromkeys(what for what in seen if what[0] in STEPS)) == SETUP + ROUND


@pytest.mark.slow
@pytest.mark.parametrize("step", SETUP + ROUND)
def test_server_killed_after_any_step_resumes_bitwise_equal(
    step: str, watch: Callable[[Callable[[str], None]], Run], tmp_path: Path
) -> None:
    def die(what: str) -> None:
        if what == step:
            raise Killed

    with pytest.raises(Killed):
        watch(die)
    number, so_far = step[0], STEPS[step[0]][: STEPS[step[0]].index(step) + 1]
    pending = set((tmp_path / "nodes").rglob(f"memory/*/{number}-*.safetensors"))
    assert bool(pending) == (f"{number} heard train.job" in so_far)
    assert_equal(watch(lambda _: None), whole())
    left = set((tmp_path / "nodes").rglob("memory/*/*.safetensors"))
    committed = f"{number} wrote manifest.json" in so_far
    assert bool(left & pending) <= committed  # a memory of a round that never was is dropped
