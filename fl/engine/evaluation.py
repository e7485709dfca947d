"""Tests after a round: the global models on the global test set, and clients on their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distillkit.sets import LabeledImages
from fl.engine import history
from fl.engine.delivery import Post
from fl.message import Message, sizes
from fl.method import Client
from fl.reduce import BadReply, check_reply
from fl.task import clients_accuracy

__all__ = ["on_clients", "on_server"]


def on_server(post: Post, test: LabeledImages | None) -> dict[str, Any]:
    """Metrics of the global models on the global test set; `accuracy` and `loss` are None without one."""
    method, server = post.method, post.server

    def work() -> dict[str, Tensor]:
        if test is None:
            return {}
        return {name: p.sums(test, server.task) for name, p in method.predictors(server).items()}

    return {"accuracy": None, "loss": None, **history.global_metrics(post.pool.on_server(work), server.task)}


def _checked(post: Post, number: int, answer: Message | None) -> tuple[str | None, Message]:
    """Why a client's answer cannot be used, if so; and the answer, empty if there was nothing to test."""
    method, server = post.method, post.server

    def work() -> tuple[str | None, Message]:
        schema = method.expect_evaluation(server, number)
        try:
            if answer is None or (isinstance(answer, Message) and not len(answer)):
                return None, Message()
            for _, group in check_reply(answer, post.entries, schema).items():
                if not isinstance(group, dict):
                    raise BadReply("a test's results must be groups of the task's sums")
                for sums in group.values():
                    server.task.check_sums(sums)
        except Exception as error:  # what came is anything: however it fails, it is this answer that failed
            return str(error)[:300], Message()
        return None, answer

    return post.pool.on_server(work)


def on_clients(post: Post, evaluate: Any) -> dict[str, Any]:
    """Accuracies on the own test images of the clients asked for ("drawn", "all", "none" or numbers), summarised."""
    if evaluate == "none":
        return {}
    server = post.server
    panel = {"drawn": server.drawn, "all": range(server.clients)}
    numbers = panel[evaluate] if isinstance(evaluate, str) else evaluate
    found: dict[str, list[float]] = {}
    tested = bytes_down = bytes_up = 0
    failed: dict[str, str] = {}

    def work(number: int) -> tuple[Client, Message | None]:
        client = post.client(number)
        if client.test is None:
            return client, None
        message, known = post.message(number), post.held(client)
        client.notes["bytes"] = sum(post.down(message, client).values())
        client.notes["new"] = post.held(client) != known
        return client, post.method.evaluate(client, message)

    for number, outcome in zip(numbers, post.pool.run(numbers, work)):
        reason, answer = outcome.error, Message()
        if reason is None and outcome.client.test is not None:
            reason, answer = _checked(post, number, outcome.reply)
        if reason is not None:
            failed[str(number)] = reason
            continue
        if outcome.client.test is None:
            continue
        tested += 1
        bytes_down += outcome.client.notes["bytes"]
        if outcome.client.notes["new"]:
            post.memories.stage(number, outcome.client.memory, server.round)
        bytes_up += sum(sizes(answer).values())
        for _, group in answer.items():
            assert isinstance(group, dict)
            for name, sums in group.items():
                found.setdefault(name, []).append(server.task.metrics(sums)["accuracy"])
    row: dict[str, Any] = {}
    for name, accuracies in found.items():
        row["accuracy_clients" if name == "global" else f"accuracy_{name}"] = clients_accuracy(accuracies)
    if tested:
        row |= {"bytes_down_evaluation": bytes_down, "bytes_up_evaluation": bytes_up}
    if failed:
        row["failed_evaluation"] = failed
    return row
