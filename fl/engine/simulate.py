"""The in-process engine: draws clients, moves messages, checks and reduces replies, counts bytes, keeps records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit._utils import check
from distillkit.privacy import Ledger
from distillkit.sets import Images, StoredImages
from fl.engine._backends import Backend, RunContext, backend_of
from fl.engine._clients import ClientRegistry
from fl.engine._privacy_validation import open_ledger
from fl.engine._run_record import data_fingerprint
from fl.engine._runner import RunConfig, play
from fl.engine._transport import Transport
from fl.engine.client_data import ClientData
from fl.engine.run import Run
from fl.method import Method, require_method
from fl.task import LabelTask

__all__ = ["ClientData", "Run", "simulate"]


def simulate(
    method: Method,
    clients: Sequence[Images | StoredImages | ClientData],
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
    backend: Backend | Literal["threads"] = "threads",
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

    The result is a function of the arguments above `backend` alone: any number of workers, and any number of kills
    and resumptions, give the same bits. Only the noise of a private method is the operating system's.

    Args:
        method: what to run, as `FedAvg(factory=...)`.
        clients: one set (or `ClientData`) a client; a `Dataset` or a pair of images and labels is read into one (see
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
            panel's. Default: the drawn clients', and nobody's in a private run or under secure sums, because these are
            exact numbers: if they are asked for, the ledger and every row say that epsilon does not cover them.
        seed: everything random follows from it, but for the noise of a private method.
        ledger: what a private method charges, with its delta and budget. Default: `out`'s ledger.jsonl (in memory
            without `out`), delta 1e-5, no budget. It is never rolled back: a round that is run again is charged again.
        secret: a seed for the noise of a private method, so that the run repeats; recorded as no guarantee.
        backend: where clients run: "threads" of this process, or `fl.Loopback()`, processes that are reached by bytes
            alone, for debugging a method of your own. Its faults, if any, are part of the result.
        workers: number of clients that run in parallel, each with one intra-op thread.
        server_threads: intra-op threads of the server's work; part of the result (rounding), so it is recorded.
        device: where clients and server compute.
        out: a folder for config.json, history.jsonl and checkpoint/; without it nothing is written.
        resume: go on from `out`'s last completed round; a finished run is returned as it is.
        transcript: keep under `out` the messages of every round that the server sent and used. (Answers before round 1
            and the results of tests are not among them.)
        notes: JSON values that `out`'s config.json shall hold under `notes`: where the data came from, say. They are no
            part of what a resumed run must have alike.
        on_round: called with each row of the history.
        progress: show a bar of the rounds, on a terminal or in a notebook.

    Raises:
        ValueError, TypeError: bad arguments. Every set is checked for one space, and the networks and whatever else
            the method was given are tried on noise, before round 1.
        NoUsableReply: a round left too little; raised after the state of the last good round is safe.
        fl.CheckpointError: `out` is unusable, torn, or holds another run.
        distillkit.locking.InUse: another process runs in `out` or with the ledger; it is named.
        BudgetExhausted: the next release would exceed the ledger's budget; the last completed round is safe.
        KeyboardInterrupt: after the running clients have stopped; `resume=True` goes on from the last round.
    """
    method = require_method(method)
    registry = ClientRegistry(clients, getattr(task, "num_classes", None), progress)
    workers, opened = check.positive_int(workers, "workers"), backend_of(backend)
    plan = RunConfig(
        method=method, first=registry.first, clients=len(registry), rounds=rounds, test=test, task=task,
        server_data=server_data, participation=participation, min_replies=min_replies, evaluate=evaluate, seed=seed,
        ledger=ledger, secret=secret, server_threads=server_threads, device=device, out=out, resume=resume,
        transcript=transcript, notes=notes, on_round=on_round, progress=progress,
        faults=opened.faults,
    )  # fmt: skip

    def transport(context: RunContext) -> Transport:
        return opened.open(method, registry, workers, context)

    return play(plan, partial(data_fingerprint, registry), transport, partial(open_ledger, registry))
