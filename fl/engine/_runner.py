"""Execution of a whole run: check the options, run or resume the rounds, and return the result."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import warn
from distillkit.fingerprint import tensor_fingerprint
from distillkit.privacy import Ledger
from distillkit.sets import LabeledImages
from fl.engine import history
from fl.engine._config import RunConfig
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._rounds import RoundRunner
from fl.engine._run_options import validate
from fl.engine._run_record import FREE, config_of, repetition, require_same, require_whole_ledger, warn_if_not_resumable
from fl.engine._threads import RunContext, ServerThread
from fl.engine._transport import Transport
from fl.engine.run import Run
from fl.engine.store import Store
from fl.method import Method
from fl.participants import Interrupted, Scratch, Server

__all__ = ["Deployment", "execute"]

_NAMED_AFTER = 3
"""Clients that have failed in every round are named in a warning after this round, and after the last one."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Information about a run's clients, and functions to reach them.

    The clients may be on this machine or on other machines.

    Attributes:
        first: set without images, with the image shape, dtype and normalization of the first client's set.
        clients: number of clients.
        fingerprint: function that takes a secret key (or b"") and returns a fingerprint of the clients' images. It is
            called only if the run writes files.
        open: function that opens and returns the transport to the clients.
        open_ledger: function that prepares the privacy ledger of a private method before round 1. It adds remarks about
            releases that epsilon does not cover, such as the clients' evaluation results. Its arguments are the ledger,
            whether the ledger was created for this run, and the clients that are evaluated.
    """

    first: LabeledImages
    clients: int
    fingerprint: Callable[[bytes], str]
    open: Callable[[RunContext], Transport]
    open_ledger: Callable[[Ledger, bool, Any], None]


def execute(method: Method, config: RunConfig, deployment: Deployment, *, progress: bool = True) -> Run:
    """Check all options, then run all rounds, or the remaining rounds of a resumed run.

    Args:
        method: method to run.
        config: the run's options.
        deployment: information about the clients, and functions to reach them.
        progress: whether to show a progress bar of the rounds.

    Raises:
        All errors that `simulate` raises.
    """
    fresh = config.ledger is None
    config, drawn = validate(config, method, deployment.first, deployment.clients, progress)
    task, ledger, folder = config.task, config.ledger, config.folder
    assert task is not None
    if ledger is not None:
        deployment.open_ledger(ledger, fresh, config.evaluate)
    store = Store(Path(folder.path)) if folder is not None else None
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store.owned())
        if ledger is not None:
            stack.enter_context(ledger.run_lock())
        thread = stack.enter_context(ServerThread(config.server_threads))
        server = _server(config, deployment)
        scratch = None
        if store is not None and folder is not None:
            scratch = Scratch(store.unfinished, folder.deadline, None if folder.cache is None else Path(folder.cache))
        memories = store.memories if store is not None else None
        context = RunContext(task, server.device, memories, server.stop, ledger, scratch)
        transport = stack.enter_context(deployment.open(context))
        stack.callback(server.stop.set)
        method.check_run(server, config.rounds)
        record: dict[str, Any] = {}
        if store is not None:
            key = store.key() if method.private or method.sealed else b""
            record = config_of(method, config, server, deployment.fingerprint(key), key)
        run_id = tensor_fingerprint([json.dumps({k: v for k, v in record.items() if k not in FREE})])
        dispatcher = Dispatcher(method, server, transport, thread, config.secret)
        transcript = folder is not None and folder.transcript
        runner = RoundRunner(dispatcher, store, config.test, run_id=run_id, transcript=transcript)  # type: ignore[arg-type]
        rows = _resume(config, runner, record) if store is not None and store.exists() else None
        if rows is None:
            rows = []
            runner.start()
            if store is not None:
                warn_if_not_resumable(record, store.out)
                store.begin({**record, **repetition(method, server, store.out)})
            runner.run_setup(range(server.clients), config.min_replies)
        remaining = range(server.round + 1, config.rounds + 1)
        total, named, dominant = server.round + len(remaining), set[str](), set[str]()
        with bar(total, "simulate", unit="round", progress=progress, done=len(rows)) as shown:

            def on_row(row: dict[str, Any]) -> None:
                rows.append(row)
                if row["round"] in (_NAMED_AFTER, config.rounds):
                    for client, why in history.always_failed(rows).items():
                        if client not in named:
                            warn(f"client {client} failed in every round in which it was drawn: {why}")
                            named.add(client)
                for client, share in row.get("dominant", {}).items():
                    if client not in dominant:
                        warn(f"round {row['round']}: the reply of client {client} makes up {share}")
                        dominant.add(client)
                if row["accuracy"] is not None:
                    shown.set_postfix_str(f"accuracy {100 * row['accuracy']:.1f} %")
                shown.update()
                if config.on_round is not None:
                    config.on_round(copy.deepcopy(row))

            runner.collector.report, runner.on_row = shown.set_postfix_str, on_row
            for number in remaining:
                runner.run_round(number, drawn, config.min_replies, config.evaluate)
                if number < config.rounds and scratch is not None and scratch.late:
                    raise Interrupted(f"the run stopped at its deadline, after round {number}")
        models = {name: p.network for name, p in thread.run(lambda: method.predictors(server)).items()}
    return Run(rows, server, models, _short(method.inner))


def _server(config: RunConfig, deployment: Deployment) -> Server:
    first, device = deployment.first, config.device
    return Server(
        config.task, first.shape, first.normalization, deployment.clients, config.seed,  # type: ignore[arg-type]
        data={name: placed(data, device) for name, data in (config.server_data or {}).items()},  # type: ignore[arg-type,misc]
        device=device, stop=threading.Event(), ledger=config.ledger, dtype=first.images.dtype,  # type: ignore[arg-type]
    )  # fmt: skip


def _resume(config: RunConfig, runner: RoundRunner, record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Restore the state of the server and of the runner from a run's folder, and return the rows of the history."""
    store, server = runner.store, runner.server
    assert store is not None
    if not config.resume:
        raise ValueError(f"{store.out} holds a run already: pass resume=True to continue it, or give another folder")
    require_same(store.out, record)
    restored = store.restore(runner.run_id, runner.dispatcher.transport.require_memories)
    runner.dispatcher.restore(restored)
    if restored is None:
        return None
    server.round, server.state = restored.round, placed(restored.state, server.device)
    store.write_models(runner.global_models())  # a kill during a commit may have left models of an uncommitted round
    rows = restored.rows
    require_whole_ledger(config.ledger, rows[-1] if rows else {}, restored.metadata)
    return rows


def _short(method: Method) -> str:
    addons = ", ".join(a.name for a in getattr(method, "addons", ()))
    return f"{type(method).__name__}({addons})" if addons else type(method).__name__
