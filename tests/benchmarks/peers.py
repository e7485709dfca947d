"""Implementations of the same round by four engines, on the shape that pfl-research publishes; each counts its replies.

1,000 users of 50 random images of 3x32x32, 50 of them in a round, batches of 10, one epoch at a rate of 0.1, averaged;
the CNN of two convolutions, 1.6 M parameters, without its dropout. (pfl-research, benchmarks/image_classification.)

    plain       one network, overwritten for every user, and a running sum: a loop of one's own, one thread
    ours        `fl.simulate`, one worker and two
    pfl         pfl-research, `SimulatedBackend`, one process
    Flower      its simulation (Ray), two actors of one core, the strategy FedAvg

As a program this is the one of Flower, which prints a line of JSON a round: `python -m tests.benchmarks.peers`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from fl import FedAvg, simulate
from fl.aggregation import Aggregator
from fl.averaging import fedavg
from fl.averaging.local import Local
from fl.engine import _reply_checks

ROOT = Path(__file__).parents[2]
IMAGES, BATCH, RATE = 50, 10, 0.1
PATIENCE = 150
"""Seconds after which Flower is given up."""

Rounds = list[dict[str, Any]]
"""Of each round the seconds, wall and CPU (None where nobody counts them), and how many replies it had."""


def cnn(outputs: int = 10) -> nn.Module:
    """Return the CNN of pfl-research's benchmark for images [N, C, H, W]."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, outputs)),
    )


def user(number: int) -> LabeledImages:
    """Return a user's images, drawn anew on each request in a few milliseconds, equal for all engines."""
    generator = derive(0, number)
    images = torch.randn(IMAGES, 3, 32, 32, generator=generator)
    return LabeledImages(
        images, torch.randint(10, (IMAGES,), generator=generator), num_classes=10, normalization=IDENTITY
    )


def train(network: nn.Module, data: LabeledImages, seed: int) -> None:
    """Train one epoch of plain SGD in place."""
    parameters = list(network.parameters())
    for index in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(seed)).split(BATCH):
        loss = F.cross_entropy(network(data.images[index]), data.labels[index])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE)


def timed(work: Callable[[int], int], rounds: int) -> Rounds:
    """Return the seconds and replies of each round."""
    found = []
    for number in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        replies = work(number)
        found.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "replies": replies})
    return found


def plain(users: Sequence[LabeledImages], cohort: int, rounds: int) -> Rounds:
    """Run the plain loop."""
    torch.set_num_threads(1)
    network = cnn()
    flat = nn.utils.parameters_to_vector(network.parameters()).detach()

    def one(number: int) -> int:
        nonlocal flat
        total, replies = torch.zeros_like(flat), 0
        for drawn in torch.randperm(len(users), generator=derive(number))[:cohort].tolist():
            nn.utils.vector_to_parameters(flat.clone(), network.parameters())
            train(network, users[drawn], drawn)
            total += nn.utils.parameters_to_vector(network.parameters()).detach()
            replies += 1
        flat = total / replies
        return replies

    return timed(one, rounds)


def ours(users: Sequence[LabeledImages], cohort: int, rounds: int, workers: int) -> Rounds:
    """Run `fl.simulate` without tests of the global model."""
    torch.set_num_threads(1)
    method, found = FedAvg(factory=cnn, lr=RATE, batch=BATCH), Rounds()
    last = [time.perf_counter(), time.process_time()]

    def between(row: Any) -> None:
        now = [time.perf_counter(), time.process_time()]
        replies = len(row["drawn"]) - len(row["failed"]) - len(row["empty"])
        found.append({"wall": now[0] - last[0], "cpu": now[1] - last[1], "replies": replies})
        last[:] = [time.perf_counter(), time.process_time()]

    simulate(
        method, list(users), rounds=rounds, participation=cohort, workers=workers, on_round=between, progress=False
    )
    return found


def parts(users: Sequence[LabeledImages], cohort: int) -> dict[str, float]:
    """Return CPU milliseconds of each part of one of our clients, by thread, the median over two rounds."""
    spent: dict[str, list[float]] = {}

    def watched(owner: Any, name: str) -> Any:
        work = getattr(owner, name)

        def watching(*given: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return work(*given, **options)
            finally:
                spent.setdefault(name, []).append(1e3 * (time.thread_time() - begun))

        return patch.object(owner, name, watching)

    with ExitStack() as stack:
        calls = (
            (Local, "__init__"),
            (fedavg, "train"),
            (FedAvg, "local"),
            (_reply_checks, "check_reply"),
            (Aggregator, "fold"),
        )
        for owner, name in calls:
            stack.enter_context(watched(owner, name))
        ours(users, cohort, 2, 1)
    took = {name: statistics.median(one) for name, one in spent.items()}
    return {
        "training": took["train"], "its network and first weights": took["__init__"],
        "its change": took["local"] - took["train"] - took["__init__"],
        "the server's check": took["check_reply"], "the server's sum": took["fold"],
    }  # fmt: skip


def pfl(users: Sequence[LabeledImages], cohort: int, rounds: int) -> Rounds:
    """Run pfl-research's loop."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = cnn()

        def loss(self, images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.network(images), labels)

        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
            return {}

    torch.set_num_threads(1)
    served = [0]

    def dataset(number: int) -> Any:
        served[0] += 1
        return PyTorchTensorDataset((users[number].images, users[number].labels), user_id=str(number))

    data = FederatedDataset(dataset, get_user_sampler("random", list(range(len(users)))))
    network, found = Learned(), Rounds()
    model = PyTorchModel(
        network, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), 1.0)
    )
    last = [time.perf_counter(), time.process_time()]

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            now = [time.perf_counter(), time.process_time()]
            found.append({"wall": now[0] - last[0], "cpu": now[1] - last[1], "replies": served[0]})
            served[0], last[:] = 0, [time.perf_counter(), time.process_time()]
            return False, Metrics()

    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=cohort, val_cohort_size=0
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
    )
    return found


def flower(users: int, cohort: int, rounds: int) -> Rounds:
    """Run Flower's simulation in a separate program, which starts and stops Ray."""
    words = [sys.executable, "-m", "tests.benchmarks.peers", *map(str, (users, cohort, rounds))]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    try:
        told = subprocess.run(  # stderr is not captured, so it shows the progress and errors
            words,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            cwd=ROOT,
            env={**os.environ, **quiet, **path},
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"its simulation did not end in {PATIENCE} s") from None
    if told.returncode:
        raise RuntimeError(f"its simulation ended with {told.returncode}")
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith('{"wall"')]


def in_flower(users: int, cohort: int, rounds: int) -> None:
    """Run the program of `flower`, which prints a line per round with the seconds of its server."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
    from flwr.simulation import run_simulation

    class Counted(FlowersFedAvg):
        begun = 0.0

        def configure_train(self, *args: Any, **options: Any) -> Any:
            self.begun = time.perf_counter()
            return super().configure_train(*args, **options)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            well = sum(not reply.has_error() for reply in replies)
            found = super().aggregate_train(server_round, replies)
            print(json.dumps({"wall": time.perf_counter() - self.begun, "cpu": None, "replies": well}), flush=True)
            return found

    server, client = ServerApp(), ClientApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Counted(
            fraction_train=cohort / users, fraction_evaluate=0.0, min_train_nodes=cohort, min_available_nodes=users
        )
        strategy.start(
            grid=grid, initial_arrays=ArrayRecord(cnn().state_dict()), num_rounds=rounds, train_config=ConfigRecord()
        )

    @client.train()
    def fit(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        network, number = cnn(), int(context.node_config["partition-id"])
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(network, user(number), number)
        metrics = MetricRecord({"num-examples": IMAGES})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    actors = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, num_supernodes=users, backend_config=actors)


if __name__ == "__main__":
    in_flower(*map(int, sys.argv[1:]))
