"""Cost of secure sums: CPU seconds of a client and of the server per round, and bytes per client, against plain rounds.

`python tests/benchmarks/bench_secure_sums.py`, or with pairs of clients and parameters: `4 100000`. The method does not
train, so the measured cost is that of the engine and the filter. Results are mean CPU seconds of three rounds, after
one round that is not counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distillkit import LabeledImages
from distillkit._utils.tables import markdown_table
from distillkit.normalization import IDENTITY
from fl import Client, FedAvg, Filtered, Keyring, Message, Method, SecureSums, simulate

CASES = ((4, 100_000), (4, 1_000_000), (10, 100_000), (50, 100_000))


class Idle(FedAvg):
    """Method that sends a constant change of every weight without training."""

    def local(self, client: Client, message: Message) -> Message:
        change = {n: torch.full_like(t, 0.01) for n, t in message[self.model].items()}
        return Message({self.samples: 1.0, self.update: change})


def line(outputs: int, weights: int) -> nn.Module:
    """Return a network with about the given number of weights."""
    width = weights // (5 + outputs)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, outputs))


@contextmanager
def methods(clients: int, weights: int) -> Iterator[dict[str, Method]]:
    """Return the method, plain and under secure sums with a threshold above two thirds of the clients."""
    with tempfile.TemporaryDirectory() as folder:
        ring = Keyring(folder)
        idle = Idle(factory=lambda outputs: line(outputs, weights))
        options: dict[str, Any] = {"keyring": ring, "threshold": 2 * clients // 3 + 1, "bounds": {FedAvg.update: 1.0}}
        yield {"plain": idle, "secure": Filtered(idle, SecureSums(ring.registry(clients), **options))}


def main() -> None:
    """Print a row for each case and method."""
    torch.set_num_threads(1)
    given = [int(a) for a in sys.argv[1:]]
    cases = list(zip(given[::2], given[1::2])) or CASES
    header, cells = ["clients", "weights", "sums", "CPU s a client", "CPU s server", "MB up", "MB down"], []
    for clients, weights in cases:
        one = LabeledImages(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]), num_classes=2, normalization=IDENTITY)
        with methods(clients, weights) as made:
            for name, method in made.items():
                rows = simulate(method, [one] * clients, rounds=4, evaluate="none", progress=False).rows[1:]
                client, server, up, down = (
                    sum(row[key] for row in rows) / len(rows)
                    for key in ("client_seconds", "server_seconds", "bytes_up", "bytes_down")
                )
                seconds = f"{client / clients:.4f}", f"{server:.4f}"
                sent = f"{up / clients / 1e6:.3f}", f"{down / clients / 1e6:.3f}"
                cells.append((str(clients), f"{weights:,}", name, *seconds, *sent))
    print(markdown_table(header, cells, left=3))


if __name__ == "__main__":
    main()
