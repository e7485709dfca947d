"""Server cost by number of clients: peak memory with 10 and 1,000 clients per round, and time with undrawn clients.

The model has a quarter of a million weights (1 MB), so that 1,000 replies that were kept would take 1 GB. Clients are
made when they are asked for; each takes one step. Every line is a process of its own.

The aims: the peak is the same for 10 and for 1,000 clients but for a few MB (most of it is PyTorch), also where clients
keep memories; a round of 5 clients takes as long among 100,000 as among 10, checkpoint included.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from distillkit import LabeledImages
from distillkit.rng import derive
from fl import FedAvg, simulate
from fl.averaging.addon import AddOn
from tests.benchmarks.clients import Clients


def eight(number: int) -> LabeledImages:
    """Return random images of a client."""
    generator = derive(number)
    return LabeledImages(
        torch.rand(8, 1, 28, 28, generator=generator), torch.randint(10, (8,), generator=generator), num_classes=10
    )


class Remembers(AddOn):
    """Add-on that keeps each client's last weights, like MOON."""

    previous = True


def network(outputs: int) -> nn.Module:
    """Return a network with a quarter of a million weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 315), nn.ReLU(), nn.Linear(315, outputs))


def measure(clients: int, drawn: int, rounds: int, workers: int, remember: bool, checkpoint: bool) -> None:
    """Run once; print the peak memory and the median seconds of all rounds but the first."""
    method = FedAvg(*([Remembers()] if remember else []), factory=network, steps=1)
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            method, Clients(clients, eight), rounds=rounds, participation=drawn, workers=workers,
            out=Path(folder) / "run" if checkpoint else None, progress=False,
        )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    later = [1e3 * row["seconds"] for row in run.rows[1:]]  # the first round pays for imports
    print(
        f"{clients:9,} clients, {drawn:5,} drawn, {workers} workers{', memories' if remember else '':10s}"
        f"{', checkpoint' if checkpoint else '':12s}  peak {peak:6.0f} MB"
        f"{f'  {statistics.median(later):8.1f} ms a round' if later else ''}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    for remember, checkpoint in ((False, False), (True, True)):
        for drawn in (10, 1000):
            _apart(drawn, drawn, 1, 2, remember, checkpoint)
    for clients in (10, 1000, 100_000):
        _apart(clients, 5, 10, 1, True, True)


def _apart(*options: float) -> None:
    subprocess.run([sys.executable, "-m", "tests.benchmarks.bench_cohort", *(str(int(o)) for o in options)], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(*(int(a) for a in sys.argv[1:5]), *(a == "1" for a in sys.argv[5:]))
    else:
        main()
