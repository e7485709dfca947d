"""Run a federated method on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from distillkit._utils import check
from distillkit.privacy import Ledger
from distillkit.privacy.validation._arguments import refuse_derived
from distillkit.sets import Images, StoredImages
from fl.engine._clients import ClientData, ClientRegistry
from fl.engine._config import RunConfig, RunFolder
from fl.engine._run_options import refuse_records, warn_of_training_images, warn_of_twins
from fl.engine._runner import execute
from fl.engine._threads import ThreadTransport
from fl.engine.run import Run
from fl.method import Method, require_method
from fl.task import LabelTask


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
    server_threads: int = 1,
    device: torch.device | str = "cpu",
    out: str | Path | RunFolder | None = None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    workers: int = 1,
    progress: bool = True,
) -> Run:
    """Run a federated method on this machine, in rounds between one server and its clients, each with its own images.

    Before the first round, every argument is checked, and the networks are tried on noise images. The result is
    bit-identical for any number of workers, and even if the run is killed and resumed. Private methods are an
    exception: their noise comes from the operating system and differs in each run, unless `secret` is given.

    Args:
        method: the method to run, such as `FedAvg(factory=...)`.
        clients: one set (or `ClientData`) for each client. A `Dataset` or a pair of images and labels is converted to
            a set (see `distillkit.sets.as_set`). A `StoredImages` is read each time its client gets a request. If
            `clients` is a list or tuple, all clients are checked before round 1. In any other sequence, a client is
            checked when it is drawn. A client without images gets no request, and is listed under `empty` in the
            history.
        rounds: number of rounds. When you resume a run, you may give more rounds than before.
        test: global test set, on which the global models are evaluated after every round; a `StoredImages` is read in
            parts.
        task: label task, which defines the loss and the form of labels: `Classification` or `MultiLabel`. Default:
            `Classification` with the first client's number of classes.
        server_data: sets that only the server has, by name.
        participation: how many clients are drawn in each round, without replacement. A float is the share of all
            clients, in (0, 1]; an int is the number of clients. Do not set `participation` or `min_replies` for a
            method that draws its clients itself and in secret (such as `ClientDP`).
        min_replies: minimum number of usable replies in a round, that is, of replies that arrive and are valid. If
            there are fewer, the run ends with `NoUsableReply`, and the last completed round is kept.
        evaluate: clients that are evaluated on their own test images after each round: "drawn" (the clients drawn in
            that round), "all", "none", or a list of client indices. Default: "none" for private methods and secure
            sums, because evaluation results contain no noise; "drawn" for all other methods. Epsilon does not cover
            evaluation results. If you set this option for a private method, the ledger and every row of the history
            state this limitation.
        seed: seed of all randomness except the noise of a private method.
        ledger: privacy ledger of a private method, with its delta and budget. Default: a ledger in `out`/ledger.jsonl
            (in memory without `out`) with delta 1e-5 and no budget. A ledger is never rolled back: a repeated round is
            charged again.
        secret: seed for the noise of a private method, if you want to repeat a run exactly. Such a run has no privacy
            guarantee, and its files say so. None draws the noise from the operating system.
        server_threads: number of intra-op threads of the server. This number affects rounding, so it is recorded.
        device: device on which clients and server compute.
        out: folder for config.json, history.jsonl and checkpoint/, or a `RunFolder`. If None, no files are written.
        resume: whether to continue the run in `out` after its last completed round. If the run is already finished, it
            is returned without changes.
        on_round: function that is called after each round with a copy of the round's row of the history.
        workers: number of clients that run in parallel, each in a thread with one intra-op thread.
        progress: whether to show a progress bar of the rounds, on a terminal or in a notebook.

    Returns:
        The history, the server's state and the global models.

    Raises:
        ValueError, TypeError: an argument is not valid, such as sets with different normalizations.
        NoUsableReply: a round has fewer usable replies than `min_replies`; the last completed round is kept.
        fl.CheckpointError: `out` cannot be written, is damaged, or holds another run.
        distillkit.locking.InUse: another process uses `out` or the ledger; the message names the process.
        BudgetExhausted: the next values to be released would exceed the privacy ledger's budget; the last completed
            round is kept.
        KeyboardInterrupt: the user interrupted the run. The error is raised after the running clients have stopped.
            Call `simulate` again with `resume=True` to continue after the last completed round.
    """
    method = require_method(method)
    config = RunConfig(
        rounds=rounds, test=test, task=task, server_data=server_data, participation=participation,
        min_replies=min_replies, evaluate=evaluate, seed=seed, ledger=ledger, secret=secret,
        server_threads=server_threads, device=device, out=out, resume=resume, on_round=on_round,
    )  # fmt: skip
    registry = ClientRegistry(clients, getattr(task, "num_classes", None), progress)
    if method.private and registry.all_loaded:
        for number, data in enumerate(registry):
            refuse_derived(data.train.info, f"clients[{number}]")
        refuse_records(method, list(registry))
    elif method.private:
        registry.on_read = partial(refuse_records, method)
    if not method.private:  # a warning would depend on records
        warn_of_training_images(test, registry)
    elif getattr(ledger, "disjoint", True):
        warn_of_twins(registry)
    transport = ThreadTransport(method, registry, check.positive_int(workers, "workers"))
    return execute(method, config, transport, progress=progress)
