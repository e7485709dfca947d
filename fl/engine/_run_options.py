"""Validation of a run's options before round 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from distillkit._evaluation_checks import images_among, warn_of_overlap
from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.fingerprint import tensor_fingerprint
from distillkit.privacy import Ledger
from distillkit.privacy.validation._arguments import (
    NEW_LEDGER_REMARK,
    refuse_derived,
    refuse_measured_normalization,
    require_given_num_classes,
)
from distillkit.privacy.validation._private_records import PrivateRecords, reachable
from distillkit.sets import Images, LabeledImages, StoredImages, as_set
from distillkit.sets.as_set import open_set
from fl.engine._clients import ClientData, ClientRegistry, fitting_set
from fl.engine._config import RunConfig, RunFolder
from fl.method import Method
from fl.task import Classification, LabelTask

Panel = Literal["drawn", "all", "none"] | list[int]
"""Clients that are evaluated on their own test images: a keyword, or client indices."""


def validate(
    config: RunConfig, method: Method, first: LabeledImages, clients: int, progress: bool
) -> tuple[RunConfig, int]:
    """Check all options of a run, and fill in the options that depend on the clients."""
    rounds, server_threads = (check.positive_int(getattr(config, name), name) for name in ("rounds", "server_threads"))
    seed = check.positive_int(config.seed, "seed", least=0)
    share = config.participation
    drawn = _drawn_count(share, clients, config.min_replies, drawn_by_method=method.draws_clients)
    folder = config.folder
    if check.boolean(config.resume, "resume") and folder is None:
        raise ValueError("resume needs a folder: give out, as out='runs/first'")
    if config.on_round is not None:
        check.callable_with(config.on_round, "on_round", ["row"], "a function of the round's row")
    require_public(method, first, config.task)
    task = resolve_task(config.task, first)
    test = config.test
    if test is not None:
        test = fitting_set(open_set(test, name="test", progress=progress), "test", first)
    server_data = _server_sets(config.server_data, first, progress)
    device = check.device(config.device)
    panel = _panel(config.evaluate, clients, hidden=method.private or method.sealed)
    _require_ledger(method, config.ledger, config.secret, folder)
    ledger = config.ledger
    if method.private and ledger is None:
        ledger = Ledger(Path(folder.path) / "ledger.jsonl" if folder is not None else None)
    share = int(share) if isinstance(share, Integral) else float(share)
    checked = replace(
        config, rounds=rounds, server_threads=server_threads, seed=seed, participation=share, task=task, test=test,
        server_data=server_data, device=device, evaluate=panel, ledger=ledger,
    )  # fmt: skip
    return checked, drawn


# The task and the sets.


def resolve_task(task: LabelTask | None, first: LabeledImages) -> LabelTask:
    """Return the task of a run. The default is classification with the first client's number of classes."""
    rows = first.labels.ndim == 2
    if task is None:
        if rows:
            raise ValueError(
                "the clients' labels are rows: pass task=MultiLabel(num_classes) if an image may have any number of "
                "classes, or class indices, `data.replace(labels=data.labels.argmax(1))`"
            )
        return Classification(first.num_classes)
    if isinstance(task, type) or not all(hasattr(task, n) for n in ("num_classes", "single_label", "loss", "sums")):
        got = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        raise TypeError(f"task must be an object, as Classification(10) or MultiLabel(10), got {got}")
    if task.num_classes != first.num_classes:
        raise ValueError(
            f"the task has {task.num_classes} classes, the clients' sets have {first.num_classes}; set the number with "
            "`data.replace(num_classes=...)`"
        )
    if task.single_label == rows:
        wanted, got = ("class indices [N]", "rows [N, K]") if rows else ("rows [N, K] of 0 and 1", "class indices [N]")
        raise ValueError(f"{task!r} needs labels as {wanted}, the clients have {got}")
    return task


def warn_of_training_images(test: object, clients: ClientRegistry) -> None:
    """Warn if some of 256 test images are among the clients' training images, of clients that are all in memory."""
    if not isinstance(test, LabeledImages) or not len(test) or not clients.all_loaded:
        return
    if not bool(torch.isfinite(test.images).all()):
        return  # `validate` refuses it
    some = test[torch.linspace(0, len(test) - 1, min(len(test), 256)).long()]
    sets = [client.train for client in clients]
    found = sum(int(images_among(some, data).sum()) for data in sets if isinstance(data, LabeledImages))
    warn_of_overlap(found, len(some), "test", "among the clients' training images")


def _server_sets(given: Mapping[str, Images] | None, first: LabeledImages, progress: bool) -> dict[str, LabeledImages]:
    """Convert the option `server_data` to sets by name, and check that they are compatible with the clients' sets.

    The set named "validation" must have the clients' classes; other sets may have other classes.
    """
    sets: dict[str, LabeledImages] = {}
    for name, images in check.mapping({} if given is None else given, "server_data").items():
        label = f"server_data[{name!r}]"
        data = as_set(images, name=label, progress=progress)
        sets[name] = fitting_set(data, label, first, classes=name == "validation")
    return sets


# Clients that are drawn, and clients that are evaluated.


def _drawn_count(participation: float | int, clients: int, min_replies: int, *, drawn_by_method: bool) -> int:
    """Check the options `participation` and `min_replies`, and return the number of clients drawn in a round."""
    check.positive_int(min_replies, "min_replies")
    if drawn_by_method and (isinstance(participation, Integral) or participation != 1.0 or min_replies != 1):
        raise ValueError(
            "the method draws its clients itself, so leave participation at 1.0 and min_replies at 1 (a privacy filter "
            f"has its own option rate); got participation={participation} and min_replies={min_replies}"
        )
    if isinstance(participation, Integral) and not isinstance(participation, bool):
        wanted = check.positive_int(int(participation), "participation")
        if wanted == 1 and clients > 1:
            warn(
                f"participation=1 draws one of {clients} clients in each round. To draw all clients, pass "
                "participation=1.0; for one client without this warning, pass participation=1 / len(clients)"
            )
    else:
        wanted = max(1, round(check.real_number(participation, "participation", above=0.0, most=1.0) * clients))
    if wanted > clients:
        raise ValueError(f"participation asks for {wanted} clients, but there are {clients}")
    if min_replies > wanted:
        raise ValueError(
            f"min_replies is {min_replies}, but only {wanted} clients take part in a round: give at most {wanted}"
        )
    return wanted


def _panel(evaluate: object, clients: int, *, hidden: bool) -> Panel:
    """Check the option `evaluate`, and return which clients are evaluated on their own test images."""
    if evaluate is None:
        return "none" if hidden else "drawn"
    if isinstance(evaluate, str):
        return check.one_of(evaluate, "evaluate", ("drawn", "all", "none"))
    wanted = "evaluate must be 'drawn', 'all', 'none' or a list of clients' numbers"
    if isinstance(evaluate, type | Mapping) or not hasattr(evaluate, "__iter__"):
        raise TypeError(f"{wanted}, got {type(evaluate).__name__}")
    given = [n.item() if isinstance(n, Tensor) and n.ndim == 0 else n for n in evaluate]
    if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in given):
        raise TypeError(f"{wanted}, got {given!r}")
    numbers = [int(n) for n in given]
    missing = [n for n in numbers if not 0 <= n < clients]
    if missing or not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{wanted}, each once, from 0 to {clients - 1}; got {numbers}")
    return numbers


def require_public(method: Method, first: LabeledImages, task: LabelTask | None) -> None:
    """Refuse a private method if the normalization, the classes or the hold-out were found in the clients' own data.

    Such values would reveal information about the data that the privacy guarantee does not cover.
    """
    if method.private:
        # A method with the option `public_statistics` makes this check itself (`PrivateFedDM`).
        if getattr(method.inner, "public_statistics", None) is None:
            refuse_measured_normalization(first.normalization, type(method.inner).__name__)
        refuse_derived(first.info, "the clients' images")
        if task is None:
            require_given_num_classes(first)


def _require_ledger(method: Method, ledger: object, secret: object, folder: RunFolder | None) -> None:
    """Check the options `ledger` and `secret` of a run."""
    if ledger is not None and not isinstance(ledger, Ledger):
        raise TypeError(f"ledger must be a distillkit.privacy.Ledger, got {type(ledger).__name__}")
    for name, value in {"ledger": ledger, "secret": secret}.items():
        if value is not None and not method.private:
            raise ValueError(
                f"{name} is given, but the method is not private and charges nothing: leave it out, or use a private "
                "method (DPSGD, ClientDP, PrivateFedDM)"
            )
    if secret is not None:
        check.positive_int(secret, "secret", least=0)  # type: ignore[arg-type]
    if isinstance(ledger, Ledger) and ledger.path is None and folder is not None:
        raise ValueError("ledger must be in a file, because the run in `out` is: Ledger(path, ...)")


# The ledger of a private run.

EXACT_TESTS = (
    "accuracies on clients' own test images were asked for (evaluate=): they are exact numbers in the history, which "
    "epsilon does not cover"
)

OWN_CODE = (
    "the code of {} is not of this package: epsilon assumes that it sends and releases nothing computed from records "
    "but what is charged"
)


def remark_on(ledger: Ledger, method: Method, fresh: bool, panel: str | Sequence[int]) -> None:
    """Add remarks to a privacy ledger about releases that its epsilon does not cover, or takes on trust."""
    if fresh:
        ledger.add_remark(NEW_LEDGER_REMARK)
    if panel != "none":
        ledger.add_remark(EXACT_TESTS)
    kinds = {type(part) for part in (method, *method.parts)}
    if own := {kind.__name__ for kind in kinds if kind.__module__.split(".")[0] not in ("distillkit", "fl")}:
        ledger.add_remark(OWN_CODE.format(", ".join(sorted(own))))


def refuse_records(method: Method, clients: Sequence[ClientData]) -> None:
    """Refuse a private method whose options, functions or networks hold the memory of the clients' records.

    Copies of records are not found.
    """
    parts = [(d.train._rows if isinstance(d.train, StoredImages) else d.train.images, d.train) for d in clients]
    tensors = [t for images, data in parts for t in (images, data.labels, *data.columns.values())]
    PrivateRecords(tensors, content=False).refuse(reachable(method), f"the method {type(method.inner).__name__}")


def warn_of_twins(clients: ClientRegistry) -> None:
    """Warn if two clients, of clients that were all read before round 1, have the same training images."""
    seen: dict[str, int] = {}
    for number, data in enumerate(clients if clients.all_loaded else ()):
        images = data.train.digests if isinstance(data.train, StoredImages) else data.train.images
        if len(images) and (first := seen.setdefault(tensor_fingerprint([images]), number)) != number:
            warn(
                f"clients {first} and {number} have the same images, but the ledger assumes that clients' records are "
                "disjoint, and so reports the largest epsilon of any client; if several clients may have a record, use "
                "Ledger(disjoint=False), which composes the events of all clients"
            )
            return
