"""Costs of a round per client: Flower's bare messages, the adapter, and threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from distillkit import LabeledImages
from distillkit.normalization import IDENTITY
from fl import Entry, EntrySpec, Message, Method, simulate
from fl.deploy.flower import ConnectionOptions, serve

POLL, ROUNDS = 0.05, 4
"""Poll interval in seconds with and without the adapter; number of rounds, including a warm-up round."""
SIZES = {"0.1 MB": 25_000, "10 MB": 2_500_000, "100 MB": 25_000_000}
"""Number of 4-byte values sent in each direction."""


class Echo(Method):
    """Clients send back the tensors that they receive."""

    value = Entry[torch.Tensor]("mean")

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def start(self, server: Any) -> None:
        server.state[self.value] = torch.randn(self.numbers, generator=server.generator("start"))

    def send(self, server: Any, client: int) -> Message:
        return Message({self.value: server.state[self.value]})

    def expect(self, server: Any, client: int) -> Any:
        return {self.value.key: EntrySpec(server.state[self.value])}

    def local(self, client: Any, message: Message) -> Message:
        return Message({self.value: message[self.value]})

    def receive(self, server: Any, replies: Any) -> None:
        server.state[self.value] = replies[self.value]


def echo_client() -> LabeledImages:
    """Return a client with one image."""
    return LabeledImages(
        torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64), num_classes=2, normalization=IDENTITY
    )


def bare(grid: Any, numbers: int) -> Iterator[float]:
    """Yield the seconds of each round with Flower alone: the same array to every node and back."""
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.app import Message as Letter

    value = torch.randn(numbers, generator=torch.Generator().manual_seed(0)).numpy()
    for number in range(ROUNDS):
        began = time.perf_counter()
        letters = [
            Letter(
                RecordDict({"value": ArrayRecord({"value": Array(value)})}), node, "train.bare", group_id=str(number)
            )
            for node in grid.get_node_ids()
        ]
        waiting, answers = set(grid.push_messages(letters)), []
        while waiting:
            came = list(grid.pull_messages(waiting))
            answers += [answer.content["value"]["value"].numpy() for answer in came]
            waiting -= {answer.metadata.reply_to_message_id for answer in came}
            if not came:
                time.sleep(POLL)
        value = sum(answers[1:], answers[0]) / len(answers)
        yield time.perf_counter() - began


def costs(grid: Any, marked: Any, payloads: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each round but the first for all clients together, for each payload."""
    for name in payloads:
        numbers, clients = SIZES[name], len(list(grid.get_node_ids()))
        options: dict[str, Any] = {"rounds": ROUNDS, "evaluate": "none"}
        rows = {
            "bare": list(bare(grid, numbers)),
            "adapter": [
                row["seconds"]
                for row in serve(
                    marked(name), Echo(numbers), connection=ConnectionOptions(poll_interval=POLL), **options
                ).rows
            ],
            "threads": [
                row["seconds"]
                for row in simulate(Echo(numbers), [echo_client()] * clients, progress=False, **options).rows
            ],
        }
        yield {"method": name, "clients": clients, **{way: seconds[1:] for way, seconds in rows.items()}}
