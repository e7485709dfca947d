"""A run from its arguments to its end, wherever the clients are: what `simulate` and the other doors share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.fingerprint import tensor_fingerprint
from distillkit.privacy import Ledger
from distillkit.sets import Images, LabeledImages, StoredImages
from fl.engine import _validation
from fl.engine._backends import RunContext, ServerThread
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._rounds import RoundRunner
from fl.engine._run_record import FREE, config_of, read_config, repetition, require_whole_ledger, warn_if_not_resumable
from fl.engine._transport import Transport
from fl.engine.run import Run
from fl.engine.store import Store
from fl.method import Method
from fl.participants import Server
from fl.task import LabelTask

__all__ = ["RunConfig", "play"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What is to be run: the arguments of `simulate`, as they were given, but for the clients and where they are.

    Attributes:
        method: what runs, see `fl.method.require_method`.
        first: none of the images of the first client, in its space.
        clients: how many there are.
        faults: what of the place where clients run is part of the result, in words; None where nothing is.
        rounds, test, task, server_data, participation, min_replies, evaluate, seed, ledger, secret, server_threads,
            device, out, resume, transcript, notes, on_round, progress: those of `simulate`.
        defer_tests: whether clients are tested with the next round's first messages, where the method allows it; then
            a round's row is told, and stands in the history, when the next round is committed.
    """

    method: Method
    first: LabeledImages
    clients: int
    rounds: int
    test: Images | StoredImages | None = None
    task: LabelTask | None = None
    server_data: Mapping[str, Images] | None = None
    participation: float | int = 1.0
    min_replies: int = 1
    evaluate: Literal["drawn", "all", "none"] | Sequence[int] | None = None
    seed: int = 0
    ledger: Ledger | None = None
    secret: int | None = None
    server_threads: int = 1
    device: torch.device | str = "cpu"
    out: str | Path | None = None
    resume: bool = False
    transcript: bool = False
    notes: Mapping[str, Any] | None = None
    on_round: Callable[[dict[str, Any]], None] | None = None
    progress: bool = True
    faults: str | None = None
    defer_tests: bool = False


def play(
    plan: RunConfig,
    data: Callable[[bytes], str],
    transport: Callable[[RunContext], Transport],
    begun: Callable[[Ledger, bool, str | list[int]], None],
) -> Run:
    """Check a plan whole, then play its rounds, or those that are left.

    Args:
        plan: what is to be run.
        data: the fingerprint of all clients' images, under a key; called for a run that keeps files.
        transport: opens the clients of the run.
        begun: notes in a private run's ledger what its epsilon leaves out; told whether the ledger is new, and the
            panel of clients that are tested.

    Raises:
        As `simulate`.
    """
    method, first, clients, progress = plan.method, plan.first, plan.clients, plan.progress
    rounds = check.positive_int(plan.rounds, "rounds")
    server_threads, seed = (
        check.positive_int(plan.server_threads, "server_threads"),
        check.positive_int(plan.seed, "seed", least=0),
    )
    drawn = _validation.drawn_count(plan.participation, clients, plan.min_replies, drawn_by_method=method.draws_clients)
    share = plan.participation
    share = int(share) if isinstance(share, Integral) else float(share)
    check.boolean(plan.defer_tests, "defer_tests")
    for name, wanted in {"transcript": plan.transcript, "resume": plan.resume}.items():
        if check.boolean(wanted, name) and plan.out is None:
            raise ValueError(f"{name} needs a folder: give out, as out='runs/first'")
    if plan.on_round is not None:
        check.callable_with(plan.on_round, "on_round", ["row"], "a function of the round's row")
    _validation.require_public(method, first, plan.task)
    task = _validation.task_at(plan.task, first)
    test = _validation.test_set(plan.test, first, progress)
    server_data = _validation.server_sets(plan.server_data, first, progress)
    device = _validation.device_at(plan.device)
    panel = _validation.panel(plan.evaluate, clients, hidden=method.private or method.sealed)
    _validation.require_ledger(method, plan.ledger, plan.secret, plan.out)
    ledger = plan.ledger
    if method.private and ledger is None:
        ledger = Ledger(Path(plan.out) / "ledger.jsonl" if plan.out is not None else None)
    if ledger is not None:
        begun(ledger, plan.ledger is None, panel)
    store = Store(Path(plan.out)) if plan.out is not None else None
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store.owned())
        if ledger is not None:
            stack.enter_context(ledger.owned())
        thread = stack.enter_context(ServerThread(server_threads))
        stop = threading.Event()
        memories = store.memories if store is not None else None
        opened = stack.enter_context(transport(RunContext(task, device, memories, stop, ledger)))
        stack.callback(stop.set)
        server = Server(
            task, first.shape, first.normalization, clients, seed,
            data={name: placed(data, device) for name, data in server_data.items()}, device=device, stop=stop,
            ledger=ledger, dtype=first.images.dtype,
        )  # fmt: skip
        method.check_run(server, rounds)
        config: dict[str, Any] = {}
        if store is not None:
            key = store.key() if method.private or method.sealed else b""
            found = data(key)
            config = config_of(
                method, clients, found, server, share, plan.min_replies, panel, server_threads, test, rounds, key
            )
            if plan.transcript:
                config["transcript"] = {
                    "adversary": "server",
                    "sees": "every message of every client in the rounds, as it travelled",
                }
            if plan.notes is not None:
                config["notes"] = dict(check.mapping(plan.notes, "notes"))
            if plan.faults is not None:
                config["faults"] = plan.faults
            if ledger is not None:
                config["privacy"] = {"delta": ledger.delta, "secret": plan.secret, "disjoint": ledger.disjoint}
        run_id = tensor_fingerprint([json.dumps({k: v for k, v in config.items() if k not in FREE})])
        dispatcher = Dispatcher(method, server, opened, thread, plan.secret)
        engine = RoundRunner(dispatcher, store, test, run_id=run_id, transcript=plan.transcript)
        rows: list[dict[str, Any]] = []
        restored = None
        if store is not None and store.exists():
            if not plan.resume:
                raise ValueError(f"{store.out} holds a run already; pass resume=True to go on, or another folder")
            read_config(store.out)
            store.require_same(config, free=FREE)
            restored = store.restore(run_id)
            dispatcher.restore(restored)
            if restored is not None:
                server.round, server.state = restored.round, placed(restored.state, device)
                engine.open = restored.open
                rows = store.history(server.round - (engine.open is not None))
                require_whole_ledger(ledger, rows[-1] if rows else {})
        if restored is None:
            engine.start()
            if store is not None:
                warn_if_not_resumable(config, store.out)
                store.begin({**config, **repetition(method, server, store.out)})
            engine.ask_setup(range(clients), plan.min_replies)
        remaining = range(server.round + 1, rounds + 1)
        defers = plan.defer_tests and panel != "none" and not method.private and not method.draws_clients
        played = server.round + len(remaining)
        with bar(played, "simulate", unit="round", progress=progress, done=len(rows)) as shown:

            def told(row: dict[str, Any]) -> None:
                rows.append(row)
                if row["accuracy"] is not None:
                    shown.set_postfix_str(f"accuracy {100 * row['accuracy']:.1f} %")
                shown.update()
                if plan.on_round is not None:
                    plan.on_round(row)

            engine.say, engine.told = shown.set_postfix_str, told
            for number in remaining:
                engine.round(number, drawn, plan.min_replies, panel, defer=defers and number < rounds)
            engine.close(panel)
        models = {name: p.network for name, p in thread.run(lambda: method.predictors(server)).items()}
    return Run(rows, server, models, _short(method.inner))


def _short(method: Method) -> str:
    addons = ", ".join(a.name for a in getattr(method, "addons", ()))
    return f"{type(method).__name__}({addons})" if addons else type(method).__name__
