"""Tests after a round: the global models on the global test set, and clients on their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from distillkit.sets import LabeledImages, StoredImages
from fl.engine import history
from fl.engine.delivery import Post, weight
from fl.engine.placement import placed
from fl.message import Message, sizes
from fl.method import at_once
from fl.reduce import BadReply, check_reply
from fl.sides import Server
from fl.task import clients_accuracy

__all__ = ["on_clients", "on_server"]


def on_server(post: Post, test: LabeledImages | StoredImages | None) -> dict[str, Any]:
    """Metrics of the global models on the global test set, for the round's row of the history.

    Args:
        post: knows the method, the server and where its work runs.
        test: the test set, of which a stored one is read piece by piece; `accuracy` and `loss` are None without one.
    """
    method, server = post.method, post.server

    def work() -> dict[str, Tensor]:
        if test is None:
            return {}
        models = method.predictors(server)
        found = [{name: p.sums(part, server.task) for name, p in models.items()} for part in _parts(test, server)]
        return {name: sum((sums[name] for sums in found[1:]), found[0][name]) for name in models}

    return {"accuracy": None, "loss": None, **history.global_metrics(post.thread.run(work), server.task)}


def _parts(test: LabeledImages | StoredImages, server: Server) -> Iterator[LabeledImages]:
    """A set that is in memory as one; of a stored one what goes through a network at once, so that no bit differs."""
    if isinstance(test, StoredImages):
        count = at_once(test.shape, server.device)
        for start in range(0, len(test), count):
            yield placed(test.read(slice(start, start + count)), server.device)
    else:
        yield test


def _checked(post: Post, number: int, answer: Message | None) -> tuple[str | None, Message]:
    """Why a client's answer cannot be used, if so; and the answer, empty if there was nothing to test."""
    method, server = post.method, post.server

    def work() -> tuple[str | None, Message]:
        schema = method.expect_evaluation(server, number)
        try:
            if answer is None or (isinstance(answer, Message) and not len(answer)):
                return None, Message()
            found = check_reply(placed(answer, server.device), post.entries, schema)
            for _, group in found.items():
                if not isinstance(group, dict):
                    raise BadReply(
                        f"a test's results must be groups of the task's sums, name -> `LabelTask.sums`, got "
                        f"{type(group).__name__}"
                    )
                for sums in group.values():
                    server.task.check_sums(sums)
        except Exception as error:  # what came is anything: however it fails, it is this answer that failed
            return str(error)[:300], Message()
        return None, found

    return post.thread.run(work)


def on_clients(post: Post, evaluate: Any) -> dict[str, Any]:
    """Have clients tested on their own test images, and summarise it for the round's row of the history.

    Args:
        post: asks them.
        evaluate: which clients: "drawn", "all", "none" or numbers.

    Returns:
        Mean, std and worst tenth of the clients' accuracies (`accuracy_clients`, `accuracy_personal`), bytes, and why
        clients failed.
    """
    if evaluate == "none":
        return {}
    server = post.server
    panel = {"drawn": server.drawn, "all": range(server.clients)}
    numbers = panel[evaluate] if isinstance(evaluate, str) else evaluate
    accuracies: dict[str, list[float]] = {}
    tested = bytes_down = bytes_up = 0
    failed: dict[str, str] = {}
    for answer, letter, _ in post.exchange("evaluate", numbers, keeps=False):
        if answer.absent:
            continue
        reason, found = answer.error, Message()
        if reason is None:
            reason, found = _checked(post, answer.client, answer.reply)
        if reason is not None:
            failed[str(answer.client)] = reason
            continue
        tested += 1
        bytes_down += sum(weight(letter).values())
        bytes_up += sum(sizes(found).values())
        post.known.told(answer.client, letter)
        for _, group in found.items():
            assert isinstance(group, dict)
            for name, sums in group.items():
                accuracies.setdefault(name, []).append(server.task.metrics(sums)["accuracy"])
    row: dict[str, Any] = {}
    for name, values in accuracies.items():
        row["accuracy_clients" if name == "global" else f"accuracy_{name}"] = clients_accuracy(values)
    if tested:
        row |= {"bytes_down_evaluation": bytes_down, "bytes_up_evaluation": bytes_up}
    if failed:
        row["failed_evaluation"] = failed
    return row
