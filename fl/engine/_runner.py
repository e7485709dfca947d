"""Execution of a whole run: check the options, run or resume the rounds, and return the result."""

from __future__ import annotations

import copy
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import warn
from distillkit.fingerprint import tensor_fingerprint
from fl.engine import history
from fl.engine._config import RunConfig
from fl.engine._devices import placed
from fl.engine._exchange import Exchanger
from fl.engine._rounds import RoundRunner
from fl.engine._run_options import remark_on, validate
from fl.engine._run_record import FREE, config_of, repetition, require_same, require_whole_ledger, warn_if_not_resumable
from fl.engine._threads import ServerThread
from fl.engine._transport import Transport
from fl.engine.run import Run
from fl.engine.store import Store
from fl.method import Method, short_name
from fl.participants import Interrupted, Scratch, Server

_NAMED_AFTER = 3
"""Clients that have failed in every round are named in a warning after this round, and after the last one."""


def execute(method: Method, config: RunConfig, transport: Transport, *, progress: bool = True) -> Run:
    """Check all options, then run all rounds, or the remaining rounds of a resumed run.

    Raises all errors that `simulate` raises.
    """
    fresh = config.ledger is None
    config, drawn = validate(config, method, transport.space, transport.clients, progress)
    ledger, folder = config.ledger, config.folder
    if ledger is not None:
        remark_on(ledger, method, fresh, config.evaluate)  # type: ignore[arg-type]
    store = Store(Path(folder.path)) if folder is not None else None
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store.owned())
        if ledger is not None:
            stack.enter_context(ledger.run_lock())
        thread = stack.enter_context(ServerThread(config.server_threads))
        server, scratch = _server(config, transport), None
        if store is not None and folder is not None:
            scratch = Scratch(store.unfinished, folder.deadline, None if folder.cache is None else Path(folder.cache))
        transport.open(server, store.memories if store is not None else None, scratch)
        stack.callback(transport.close)
        stack.callback(server.stop.set)
        method.check_run(server, config.rounds)
        record: dict[str, Any] = {}
        if store is not None:
            key = store.key() if method.private or method.sealed else b""
            record = config_of(method, config, server, transport.fingerprint(key), key)
        run_id = tensor_fingerprint([json.dumps({k: v for k, v in record.items() if k not in FREE})])
        transcript = store if folder is not None and folder.transcript else None
        exchanger = Exchanger(method, server, transport, thread, config.secret, transcript)
        runner = RoundRunner(
            exchanger, store, config.test, run_id=run_id, participation=drawn, min_replies=config.min_replies,  # type: ignore[arg-type]
            evaluate=config.evaluate,  # type: ignore[arg-type]
        )  # fmt: skip
        rows = _resume(config, runner, record) if store is not None and store.exists() else None
        if rows is None:
            rows = []
            runner.start()
            if store is not None:
                warn_if_not_resumable(record, store.out)
                store.begin({**record, **repetition(method, server, store.out)})
            runner.run_setup()
        remaining = range(server.round + 1, config.rounds + 1)
        with bar(server.round + len(remaining), "simulate", unit="round", progress=progress, done=len(rows)) as shown:
            exchanger.report, runner.on_row = shown.set_postfix_str, _Reporter(rows, config, shown)
            for number in remaining:
                runner.run_round(number)
                if number < config.rounds and scratch is not None and scratch.late:
                    raise Interrupted(f"the run stopped at its deadline, after round {number}")
        models = {name: p.network for name, p in thread.run(lambda: method.predictors(server)).items()}
    return Run(rows, server, models, short_name(method.inner))


class _Reporter:
    """Function that collects the rows of the history, shows progress, and warns of clients that harm the run."""

    def __init__(self, rows: list[dict[str, Any]], config: RunConfig, shown: Any) -> None:
        self._rows, self._config, self._shown = rows, config, shown
        self._named: set[tuple[str, str]] = set()

    def __call__(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if row["round"] in (_NAMED_AFTER, self._config.rounds):
            for client, why in history.always_failed(self._rows).items():
                self._warn_once(client, "failed", f"client {client} failed in every round in which it was drawn: {why}")
        for client, share in row.get("dominant", {}).items():
            text = f"round {row['round']}: the reply of client {client} makes up {share}"
            self._warn_once(client, "dominant", text)
        if row["accuracy"] is not None:
            self._shown.set_postfix_str(f"accuracy {100 * row['accuracy']:.1f} %")
        self._shown.update()
        if self._config.on_round is not None:
            self._config.on_round(copy.deepcopy(row))

    def _warn_once(self, client: str, kind: str, text: str) -> None:
        if (client, kind) not in self._named:
            warn(text)
            self._named.add((client, kind))


def _server(config: RunConfig, transport: Transport) -> Server:
    space, device = transport.space, config.device
    return Server(
        config.task, space.shape, space.normalization, transport.clients, config.seed,  # type: ignore[arg-type]
        data={name: placed(data, device) for name, data in (config.server_data or {}).items()},  # type: ignore[arg-type,misc]
        device=device, stop=threading.Event(), ledger=config.ledger, dtype=space.images.dtype,  # type: ignore[arg-type]
    )  # fmt: skip


def _resume(config: RunConfig, runner: RoundRunner, record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Restore the state of the server and of the runner from a run's folder, and return the rows of the history."""
    store, server = runner.store, runner.server
    assert store is not None
    if not config.resume:
        raise ValueError(f"{store.out} holds a run already: pass resume=True to continue it, or give another folder")
    require_same(store.out, record)
    restored = store.restore(runner.run_id, runner.exchanger.transport.require_memories)
    runner.exchanger.restore(restored)
    if restored is None:
        return None
    server.round, server.state = restored.round, placed(restored.state, server.device)
    store.write_models(runner.global_models())  # a kill during a commit may have left models of an uncommitted round
    rows = restored.rows
    require_whole_ledger(config.ledger, rows[-1] if rows else {}, restored.metadata)
    return rows
