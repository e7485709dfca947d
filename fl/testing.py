"""Tests after a round: the global models on the global test set, and clients on their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distillkit.sets import LabeledImages
from fl import history
from fl.message import Message, sizes
from fl.method import Client
from fl.post import Post

__all__ = ["on_clients", "on_server"]


def on_server(post: Post, test: LabeledImages | None) -> dict[str, Any]:
    """Metrics of the global models on the global test set; `accuracy` and `loss` are None without one."""
    method, server = post.method, post.server

    def work() -> dict[str, Tensor]:
        if test is None:
            return {}
        return {name: p.sums(test, server.task) for name, p in method.predictors(server).items()}

    return {"accuracy": None, "loss": None, **history.global_metrics(post.pool.on_server(work), server.task)}


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
        if outcome.error is not None:
            failed[str(number)] = outcome.error
            continue
        if outcome.client.test is None:
            continue
        tested += 1
        bytes_down += outcome.client.notes["bytes"]
        if outcome.client.notes["new"]:
            post.memories.stage(number, outcome.client.memory, server.round)
        bytes_up += sum(sizes(outcome.reply or Message()).values())
        for _, group in (outcome.reply or Message()).items():
            assert isinstance(group, dict)
            for name, sums in group.items():
                found.setdefault(name, []).append(server.task.metrics(sums)["accuracy"])
    row: dict[str, Any] = {}
    for name, accuracies in found.items():
        row["accuracy_clients" if name == "global" else f"accuracy_{name}"] = history.clients_accuracy(accuracies)
    if tested:
        row |= {"bytes_down_evaluation": bytes_down, "bytes_up_evaluation": bytes_up}
    if failed:
        row["failed_evaluation"] = failed
    return row
