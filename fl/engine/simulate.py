"""The in-process engine: draws clients, moves messages, checks and reduces replies, counts bytes, keeps records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit import check
from distillkit.fingerprint import tensor_fingerprint
from distillkit.privacy import Ledger
from distillkit.progress import bar
from distillkit.sets import Images, StoredImages
from fl.engine import door
from fl.engine.delivery import Post
from fl.engine.holding import Holding
from fl.engine.placement import placed
from fl.engine.pools import ServerThread
from fl.engine.private_door import open_ledger
from fl.engine.record import FREE, config_of, read_config, repetition, require_whole_ledger, warn_if_not_resumable
from fl.engine.roster import Roster
from fl.engine.rounds import Engine
from fl.engine.run import Run
from fl.engine.store import Store
from fl.engine.where import Where, loopback_of, open_cohort
from fl.method import Method, require_method
from fl.sides import Server
from fl.task import LabelTask

__all__ = ["Holding", "Run", "simulate"]


def simulate(
    method: Method,
    clients: Sequence[Images | StoredImages | Holding],
    *,
    rounds: int,
    test: Images | StoredImages | None = None,
    task: LabelTask | None = None,
    server_data: Mapping[str, Images] | None = None,
    participation: float | int = 1.0,
    min_replies: int = 1,
    evaluate: Literal["drawn", "all", "none"] | Sequence[int] | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    secret: int | None = None,
    where: Where = "threads",
    workers: int = 1,
    server_threads: int = 1,
    device: torch.device | str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    transcript: bool = False,
    notes: Mapping[str, Any] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
) -> Run:
    """Run a federated method: rounds between one server and its clients, each a set of images, on this machine.

    Every argument is checked, and the networks are tried on noise, before the first round. Returns a `Run`: the
    history, the server's state and the global models.

    The result is a function of the arguments above `where` alone: any number of workers, and any number of kills
    and resumptions, give the same bits. Only the noise of a private method is the operating system's.

    Args:
        method: what to run, as `FedAvg(factory=...)`.
        clients: one set (or `Holding`) a client; a `Dataset` or a pair of images and labels is read into one (see
            `distillkit.sets.as_set`); a `StoredImages` is read whenever the client is asked, and let go then. A list is
            checked whole; of another sequence only drawn clients are looked at. A client without images is
            recorded as `empty` and not asked.
        rounds: how many rounds; a resumed run may ask for more than before.
        test: the global test set, evaluated after every round; a `StoredImages` is read piece by piece.
        task: what the labels mean; default: `Classification` with the first client's class count.
        server_data: sets that only the server holds, by name.
        participation: share in (0, 1] or number of the clients drawn in a round, without replacement.
        min_replies: fewer usable replies than this end the run with `NoUsableReply` (the last round is kept). Neither
            is for a method that draws its clients itself: that is done in secret, and may draw nobody.
        evaluate: whose own test images are used after a round: the drawn clients', all clients', nobody's, or a fixed
            panel's. Default: the drawn clients', and nobody's in a private run, because these are exact numbers: if
            they are asked for, the ledger and every row say that epsilon does not cover them.
        seed: everything random follows from it, but for the noise of a private method.
        ledger: what a private method charges, with its delta and budget. Default: `out`'s ledger.jsonl (in memory
            without `out`), delta 1e-5, no budget. It is never rolled back: a round that is run again is charged again.
        secret: a seed for the noise of a private method, so that the run repeats; recorded as no guarantee.
        where: "threads" of this process, or a "loopback": other processes that are reached by bytes alone, with
            `fl.Loopback` for faults on demand (then it is part of the result). For debugging a method of one's own.
        workers: threads, or processes of the loopback, that run clients, each with one intra-op thread.
        server_threads: intra-op threads of the server's work; part of the result (rounding), so it is recorded.
        device: where clients and server compute.
        out: a folder for config.json, history.jsonl and checkpoint/; without it nothing is written.
        resume: go on from `out`'s last completed round; a finished run is returned as it is.
        transcript: keep every message that the server saw under `out`.
        notes: JSON values that `out`'s config.json shall hold under `notes`: where the data came from, say. They are no
            part of what a resumed run must have alike.
        on_round: called with each row of the history.
        progress: show a bar of the rounds, on a terminal or in a notebook.

    Raises:
        ValueError, TypeError: bad arguments. Every set is checked for one space, and the networks and whatever else
            the method was given are tried on noise, before round 1.
        NoUsableReply: a round left too little; raised after the state of the last good round is safe.
        fl.CheckpointError: `out` is unusable, torn, or holds another run.
        distillkit.owner.InUse: another process runs in `out` or with the ledger; it is named.
        BudgetExhausted: the next release would exceed the ledger's budget; the last completed round is safe.
        KeyboardInterrupt: after the running clients have stopped; `resume=True` goes on from the last round.
    """
    method = require_method(method)
    clients = Roster(clients, getattr(task, "num_classes", None), progress)
    first = clients.first
    rounds, workers = check.positive_int(rounds, "rounds"), check.positive_int(workers, "workers")
    server_threads, seed = (
        check.positive_int(server_threads, "server_threads"),
        check.positive_int(seed, "seed", least=0),
    )
    drawn = door.drawn_count(participation, len(clients), min_replies, drawn_by_method=method.draws_clients)
    participation = int(participation) if isinstance(participation, Integral) else float(participation)
    for name, wanted in {"transcript": transcript, "resume": resume}.items():
        if check.switch(wanted, name) and out is None:
            raise ValueError(f"{name} needs a folder: give out, as out='runs/first'")
    if on_round is not None:
        check.callable_with(on_round, "on_round", ["row"], "a function of the round's row")
    door.require_public(method, first, task)
    task = door.task_at(task, first)
    test, server_data = door.test_set(test, first, progress), door.server_sets(server_data, first, progress)
    device = door.device_at(device)
    loopback = loopback_of(where)
    panel = door.panel(evaluate, len(clients), private=method.private)
    door.require_ledger(method, ledger, secret, out)
    fresh = ledger is None
    if method.private and ledger is None:
        ledger = Ledger(Path(out) / "ledger.jsonl" if out is not None else None)
    if ledger is not None:
        open_ledger(ledger, fresh, clients, panel)
    store = Store(Path(out)) if out is not None else None
    with ExitStack() as stack:
        if store is not None:
            stack.enter_context(store.owned())
        if ledger is not None:
            stack.enter_context(ledger.owned())
        thread = stack.enter_context(ServerThread(server_threads))
        stop = threading.Event()
        memories = store.memories if store is not None else None
        cohort = stack.enter_context(
            open_cohort(
                loopback, method, task, clients, workers, device=device, memories=memories, stop=stop, ledger=ledger
            )
        )
        stack.callback(stop.set)
        server = Server(
            task, first.shape, first.normalization, len(clients), seed,
            data={name: placed(data, device) for name, data in server_data.items()}, device=device, stop=stop,
            ledger=ledger, dtype=first.images.dtype,
        )  # fmt: skip
        method.check_run(server, rounds)
        config: dict[str, Any] = {}
        if store is not None:
            key = store.key() if method.private else b""
            config = config_of(
                method, clients, server, participation, min_replies, panel, server_threads, test, rounds, key
            )
            if transcript:
                config["transcript"] = {"adversary": "server", "sees": "every message of every client, as it travelled"}
            if notes is not None:
                config["notes"] = dict(check.mapping(notes, "notes"))
            if loopback is not None and loopback.faulty:
                config["faults"] = repr(loopback)
            if ledger is not None:
                config["privacy"] = {"delta": ledger.delta, "secret": secret, "disjoint": ledger.disjoint}
        run_id = tensor_fingerprint([json.dumps({k: v for k, v in config.items() if k not in FREE})])
        post = Post(method, server, cohort, thread, secret)
        engine = Engine(post, store, test, run_id=run_id, transcript=transcript)
        rows: list[dict[str, Any]] = []
        if store is not None and store.exists():
            if not resume:
                raise ValueError(f"{store.out} holds a run already; pass resume=True to go on, or another folder")
            read_config(store.out)
            store.require_same(config, free=FREE)
            restored = store.restore(run_id)
            post.restore(restored)
            if restored is not None:
                server.round, server.state = restored.round, placed(restored.state, device)
                rows = store.history(server.round)
                require_whole_ledger(ledger, rows[-1])
        if not rows:
            engine.start()
            if store is not None:
                warn_if_not_resumable(config, store.out)
                store.begin({**config, **repetition(method, server, store.out)})
            engine.ask_setup(range(len(clients)), min_replies)
        remaining = range(server.round + 1, rounds + 1)
        with bar(len(rows) + len(remaining), "simulate", unit="round", progress=progress, done=len(rows)) as shown:
            engine.say = shown.set_postfix_str
            for number in remaining:
                row = engine.round(number, drawn, min_replies, panel)
                rows.append(row)
                if row["accuracy"] is not None:
                    shown.set_postfix_str(f"accuracy {100 * row['accuracy']:.1f} %")
                shown.update()
                if on_round is not None:
                    on_round(row)
        models = {name: p.network for name, p in thread.run(lambda: method.predictors(server)).items()}
    return Run(rows, server, models, _short(method.inner))


def _short(method: Method) -> str:
    addons = ", ".join(a.name for a in getattr(method, "addons", ()))
    return f"{type(method).__name__}({addons})" if addons else type(method).__name__
