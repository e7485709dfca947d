"""Growth of CPU seconds, bytes and memory of the engine with drawn and registered clients.

    python -m tests.benchmarks scaling

Clients only return the message that they receive. The measured cost is therefore that of the engine: requests, checks,
aggregation and statistics. Every measurement is a process of its own, and writes a row of `docs/results/scaling.json`
at once. Existing rows are not measured again, so an interrupted run continues. `docs/scripts/tables.py` makes a
table of the page.

    drawn        all of 10, 100, 1,000 clients in every round, with networks of 10^4 to 10^6 weights
    registered   10 drawn among 10 to 10^6, which are created on demand
    listed       10 drawn among 10 to 10,000 in a list, all of which are checked
    long         the same, but many rounds: memory of the history
    kept         clients that keep a memory as large as the network, in a run that keeps files
    union        clients that send images, which the server keeps side by side (FedDM's kind)
    flower       the adapter over a grid in memory, without Flower itself: 10 and 100 nodes
    start        a process that does nothing but import what a node needs, as Flower starts one for every message
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from distillkit import LabeledImages
from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import git_commit
from distillkit._utils.tables import markdown_table
from distillkit.normalization import IDENTITY
from fl import Client, FedAvg, FedDM, Message, Method, simulate
from fl.aggregation import AggregatedReplies
from fl.deploy.flower import ConnectionOptions, client_app, serve
from fl.participants import Server
from tests.benchmarks.clients import Clients
from tests.fl.flower import fake_flower

RECORD = Path(__file__).parents[2] / "docs" / "results" / "scaling.json"
COMMAND = "python -m tests.benchmarks scaling"
ROUNDS = {10: 11, 100: 5, 1000: 3}
"""By how many are drawn; the first, which pays for the start, is counted apart, and of the others the median counts."""

LONG = 41
"""Rounds of the part `long`."""


@dataclass(frozen=True)
class Case:
    """Case to measure: number of clients, drawn clients and weights."""

    part: str
    clients: int
    drawn: int
    weights: int
    seed: int


def cases() -> Iterator[Case]:
    """Return all cases, cheapest first."""
    for seed in range(3):
        yield Case("start", 0, 0, 0, seed)
        yield from (Case("registered", n, 10, 100_000, seed) for n in (10, 100, 1000, 10_000, 1_000_000))
        yield from (Case("listed", n, 10, 100_000, seed) for n in (10, 100, 1000, 10_000))
        yield from (Case("drawn", n, n, w, seed) for n in (10, 100) for w in (10_000, 100_000, 1_000_000))
        yield from (Case("kept", n, n, 10_000, seed) for n in (10, 100))
        yield from (Case("union", n, n, 10_000, seed) for n in (10, 100, 1000))
        yield from (Case("flower", n, n, w, seed) for n in (10, 100) for w in (10_000, 1_000_000))
    for seed in range(3):
        yield from (Case("drawn", 1000, 1000, w, seed) for w in (10_000, 100_000))
        yield Case("kept", 1000, 1000, 10_000, seed)
    yield from (Case("drawn", 1000, 1000, 1_000_000, seed) for seed in range(3))
    yield Case("long", 1000, 1000, 10_000, 0)


def two(number: int) -> LabeledImages:
    """Return two small images, the same for all clients."""
    return LabeledImages(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]), num_classes=2, normalization=IDENTITY)


class Echo(FedAvg):
    """Method that returns the received update, and with `keeps` stores it as memory."""

    keeps = False

    def local(self, client: Client, message: Message) -> Message:
        if self.keeps:
            client.memory[self.last] = message[self.model]
        return Message({self.samples: 1.0, self.update: message[self.model]})


class Pictures(FedDM):
    """Method that sends the same ten images of 3x32x32; the server stores those of all clients."""

    sent = LabeledImages(torch.zeros(10, 3, 32, 32), torch.arange(10), num_classes=10, normalization=IDENTITY)

    def local(self, client: Client, message: Message) -> Message:
        return Message({self.images: self.sent})

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        server.state[self.images] = replies[self.images]


def network(weights: int, inputs: int, outputs: int) -> nn.Module:
    """Return two layers with about the given number of weights."""
    width = weights // (inputs + 1 + outputs)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def one(number: int) -> LabeledImages:
    """Return an image in the space of those that `Pictures` sends."""
    return Pictures.sent[:1]


class Split(nn.Module):
    """Minimal network with features and a classifier, as FedDM needs."""

    def __init__(self, weights: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = network(weights, 3, outputs)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(images))


def method_of(case: Case) -> Method:
    """Return the method of a case."""
    if case.part == "union":
        return Pictures(factory=lambda outputs: Split(case.weights, outputs), ipc=1)
    method = Echo(factory=lambda outputs: network(case.weights, 4, outputs))
    method.keeps = case.part == "kept"
    return method


def play(case: Case, folder: Path, marks: list[float]) -> list[dict[str, Any]]:
    """Run; return the rows and the end of each round in CPU seconds of this process."""

    def mark(_: object) -> None:
        marks.append(time.process_time())

    method = method_of(case)
    rounds = LONG if case.part == "long" else ROUNDS[case.drawn]
    options: dict[str, Any] = {"rounds": rounds, "evaluate": "none", "seed": case.seed, "on_round": mark}
    if case.part == "flower":
        clients = Clients(case.clients, two)
        with fake_flower.installed():
            app = client_app(method, lambda k: clients[k], folder=folder)
            nodes = {100 + k: fake_flower.context(100 + k, k, case.clients) for k in range(case.clients)}
            grid, connection = fake_flower.Grid(app, nodes), ConnectionOptions(poll_interval=1e-4)
            return serve(grid, method, connection=connection, **options).rows
    clients = Clients(case.clients, one if case.part == "union" else two)
    given: Sequence[LabeledImages] = [clients[k] for k in range(len(clients))] if case.part == "listed" else clients
    marks[0] = time.process_time()
    out = folder / "run" if case.part == "kept" else None
    return simulate(method, given, participation=case.drawn, out=out, progress=False, **options).rows


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case: Case, to: Connection) -> None:
    """Run one case in this process and send its cost."""
    torch.set_num_threads(1)
    before, marks = peak(), [time.process_time()]
    with tempfile.TemporaryDirectory() as name:
        rows = play(case, Path(name), marks)
        kept = sum(p.stat().st_size for p in Path(name).rglob("*.safetensors") if "clients" in p.parts)
    if any(row["failed"] or len(row["drawn"]) != case.drawn for row in rows):
        raise RuntimeError(f"{case}: {rows[-1]['failed'] or 'another number of clients'}")
    later, spent = rows[1:], [b - a for a, b in itertools.pairwise(marks[1:])]
    to.send({
        "rounds": len(rows),
        "cpu_round": statistics.median(spent),
        "cpu_client": statistics.median(row["client_seconds"] for row in later) / case.drawn,
        "cpu_first": marks[1] - marks[0],
        "bytes_up": later[-1]["bytes_up"] // case.drawn,
        "bytes_down": later[-1]["bytes_down"] // case.drawn,
        "bytes_history": len(json.dumps(later[-1])),
        "bytes_kept": kept // case.drawn,
        "memory_before": before,
        "memory_peak": peak(),
        "seconds": time.process_time(),
    })  # fmt: skip


def start() -> dict[str, Any]:
    """Return the cost of a process that imports what a node needs, and of one that imports only PyTorch."""
    found: dict[str, Any] = {}
    for name, module in (("torch", "torch"), ("node", "fl.deploy.flower")):
        words = f"import {module}, resource; r = resource.getrusage(resource.RUSAGE_SELF)"
        said = f"{words}; print(r.ru_utime + r.ru_stime, r.ru_maxrss / 1024)"
        line = subprocess.run([sys.executable, "-c", said], cwd=RECORD.parents[2], capture_output=True, check=True)
        found[f"cpu_{name}"], found[f"memory_{name}"] = map(float, line.stdout.split())
    return {**found, "seconds": found["cpu_torch"] + found["cpu_node"]}


def measured(case: Case) -> dict[str, Any]:
    """Return the cost of a case from a separate process, a fork of this one that has imported everything."""
    if case.part == "start":
        return start()
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=measure, args=(case, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError(f"{case} failed; see above") from None
    finally:
        process.join()


def commit() -> str | None:
    """Return the commit, with `+` if anything but the record has changed."""
    words = ["git", "status", "--porcelain", "--untracked-files=no"]
    status = subprocess.run(words, cwd=RECORD.parent, capture_output=True, encoding="utf-8").stdout
    found = git_commit()
    return found.rstrip("+") if found and status.split() == ["M", "docs/results/scaling.json"] else found


def table(record: dict[str, Any]) -> str:
    """Return CPU time and memory of each case: the smallest CPU time of the seeds, and the largest in brackets."""
    groups: dict[tuple[str, int, int, int], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["part"], row["clients"], row["drawn"], row["weights"]), []).append(row)
    lines = []
    for (part, clients, drawn, weights), own in sorted(groups.items()):
        if drawn and part != "long":
            spent = sorted(1e3 * row["cpu_round"] / drawn for row in own)
            grown = max(row["memory_peak"] - row["memory_before"] for row in own)
            sizes = (f"{clients:,}", f"{drawn:,}", f"{weights:,}")
            lines.append((part, *sizes, f"{spent[0]:.2f} ({spent[-1]:.2f})", f"{grown:.0f}"))
    head = ("clients that are", "clients", "drawn", "weights", "CPU ms per drawn client", "memory MiB")
    return markdown_table(head, lines)


def main() -> None:
    """Measure all rows that the record lacks."""
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["rows"] if RECORD.exists() else []
    done = {tuple(row[name] for name in Case.__annotations__) for row in rows}
    facts = {"commit": commit(), "torch": str(torch.__version__), "python": platform.python_version()}
    for case in cases():
        if tuple(asdict(case).values()) not in done:
            rows.append({**asdict(case), **measured(case), **facts})
            text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
            write_atomically(RECORD, f'{{"command": "{COMMAND}", "rows": [\n{text}\n]}}\n'.encode())
            print(json.dumps(rows[-1]), flush=True)
    print(f"{RECORD} has all {len(rows)} rows; remove one to measure it anew")


if __name__ == "__main__":
    main()
