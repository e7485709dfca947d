"""The engine beside its peers on the shape that pfl-research publishes: seconds of a round, each with its replies.

1,000 users of 50 random images of 3x32x32, 50 of them in a round, batches of 10, one epoch at a rate of 0.1, averaged;
the CNN of two convolutions, 1.6 M parameters, without its dropout. (pfl-research, benchmarks/image_classification.)

    plain       one network, overwritten for every user, and a running sum: a loop of one's own, one thread
    ours        `fl.simulate`, one worker and two
    pfl         pfl-research, `SimulatedBackend`, one process
    Flower      its simulation (Ray), two actors of one core, the strategy FedAvg

Needs an environment with both peers: `make bench-peers`. A peer that is not installed has no row. Repeats take turns;
a repeat is four rounds, of which the first is not counted (Flower's starts its actors). A way whose rounds did not have
50 replies each stops the program: rounds in which clients fail are fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from fl import FedAvg, simulate

USERS, COHORT, IMAGES, BATCH, RATE = 1000, 50, 50, 10, 0.1
Rounds = list[dict[str, float]]


def cnn(outputs: int = 10) -> nn.Module:
    """The CNN of pfl-research's benchmark, for images [N, C, H, W]."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, outputs)),
    )


def user(number: int) -> LabeledImages:
    """A user's images, drawn anew whenever they are asked for: a few milliseconds, the same for all ways."""
    generator = derive(0, number)
    images = torch.randn(IMAGES, 3, 32, 32, generator=generator)
    return LabeledImages(
        images, torch.randint(10, (IMAGES,), generator=generator), num_classes=10, normalization=IDENTITY
    )


def train(network: nn.Module, data: LabeledImages, seed: int) -> None:
    """One epoch of plain SGD in place."""
    parameters = list(network.parameters())
    for index in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(seed)).split(BATCH):
        loss = F.cross_entropy(network(data.images[index]), data.labels[index])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE)


def timed(work: Callable[[int], int], rounds: int) -> Rounds:
    """Seconds and replies of each round."""
    found = []
    for number in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        replies = work(number)
        found.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "replies": replies})
    return found


def plain(users: Sequence[LabeledImages], rounds: int) -> Rounds:
    """The loop that one would write."""
    torch.set_num_threads(1)
    network = cnn()
    flat = nn.utils.parameters_to_vector(network.parameters()).detach()

    def one(number: int) -> int:
        nonlocal flat
        total, replies = torch.zeros_like(flat), 0
        for drawn in torch.randperm(len(users), generator=derive(number))[:COHORT].tolist():
            nn.utils.vector_to_parameters(flat.clone(), network.parameters())
            train(network, users[drawn], drawn)
            total += nn.utils.parameters_to_vector(network.parameters()).detach()
            replies += 1
        flat = total / replies
        return replies

    return timed(one, rounds)


def ours(users: Sequence[LabeledImages], rounds: int, workers: int) -> Rounds:
    """`fl.simulate`: what a user writes, the global model not tested."""
    torch.set_num_threads(1)
    method, found = FedAvg(factory=cnn, lr=RATE, batch=BATCH), list[dict[str, float]]()
    last = [time.perf_counter(), time.process_time()]

    def between(row: Any) -> None:
        now = [time.perf_counter(), time.process_time()]
        replies = len(row["drawn"]) - len(row["failed"]) - len(row["empty"])
        found.append({"wall": now[0] - last[0], "cpu": now[1] - last[1], "replies": replies})
        last[:] = [time.perf_counter(), time.process_time()]

    simulate(
        method, list(users), rounds=rounds, participation=COHORT / len(users), workers=workers, on_round=between,
        progress=False,
    )  # fmt: skip
    return found


def pfl(users: Sequence[LabeledImages], rounds: int) -> Rounds:
    """pfl-research's own loop."""
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
    network, found = Learned(), list[dict[str, float]]()
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
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
    )
    return found


def flower(rounds: int, users: int) -> Rounds:
    """Flower's simulation, in a program of its own: Ray is started and stopped with it."""
    told = subprocess.run(
        [sys.executable, __file__, "--flower", str(rounds), "--users", str(users), "--cohort", str(COHORT)],
        stdout=subprocess.PIPE, check=True, text=True,
        env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith('{"wall"')]


def in_flower(rounds: int, users: int) -> None:
    """The program of `flower`; it prints a line a round. Flower counts the seconds of its server, not its actors'."""
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
            fraction_train=COHORT / users, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=users
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


def installed(name: str) -> str:
    """The version of a package, or "" without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Print the table."""
    global COHORT
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="of a repeat; the first is not counted")
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--cohort", type=int, default=COHORT)
    parser.add_argument("--flower", type=int, default=0, help=argparse.SUPPRESS)
    o = parser.parse_args()
    COHORT = o.cohort
    if o.flower:
        in_flower(o.flower, o.users)
        return
    users = [user(number) for number in range(o.users)]
    ways: dict[str, Callable[[int], Rounds]] = {"plain loop": partial(plain, users)}
    for workers in (1, 2):
        ways[f"ours, workers {workers}"] = partial(ours, users, workers=workers)
    if installed("pfl"):
        ways[f"pfl {installed('pfl')}"] = partial(pfl, users)
    if installed("flwr") and installed("ray"):
        ways[f"Flower {installed('flwr')}"] = partial(flower, users=o.users)
    found: dict[str, Rounds] = {name: [] for name in ways}
    for _ in range(o.repeats):
        for name, way in ways.items():
            rounds = way(o.rounds)
            if [row["replies"] for row in rounds] != [COHORT] * o.rounds:
                raise RuntimeError(f"{name}: rounds with other than {COHORT} replies each: {rounds}")
            found[name] += rounds[1:]
    base = found["plain loop"]
    print(f"torch {torch.__version__}; {o.users:,} users, {COHORT} in a round")
    print("| way | rounds | replies | wall, s | min | max | wall / plain | CPU / plain |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, rows in found.items():
        wall, cpu = [row["wall"] for row in rows], [row["cpu"] for row in rows]
        ratio = statistics.median(wall) / statistics.median(row["wall"] for row in base)
        worked = "–" if None in cpu else f"{statistics.median(cpu) / statistics.median(r['cpu'] for r in base):.2f}"
        said = f"{statistics.median(wall):.2f} | {min(wall):.2f} | {max(wall):.2f} | {ratio:.2f} | {worked}"
        print(f"| {name} | {len(rows)} | {sum(row['replies'] for row in rows):.0f} | {said} |")


if __name__ == "__main__":
    main()
