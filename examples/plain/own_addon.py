"""Write an add-on to FedAvg: L2 regularization of the weights, as a term of the local loss."""

from dataclasses import dataclass

import torch
from torch import nn

from distillkit.data import clients, load, partition
from fl import AddOn, FedAvg, Step, simulate
from fl.addons import FedProx

train, test = load("digits", size=16)
client_data = clients(train, partition.dirichlet(train.labels, 10, alpha=0.1))


def network(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, outputs),
    )  # fmt: skip


@dataclass(frozen=True)
class L2(AddOn):
    """Add `weight / 2 * ||w||^2` to every local loss."""

    weight: float = 1e-3
    data_access = "none"  # no private data beyond what every local step reads

    def loss(self, step: Step) -> torch.Tensor:
        """Return the term of the loss for one local step."""
        parameters = step.local.shared_parameters().values()
        return torch.stack([p.square().sum() for p in parameters]).sum() * self.weight / 2


for addons in ([], [L2()], [L2(), FedProx(0.01)]):
    run = simulate(FedAvg(*addons, factory=network, lr=0.1), client_data, rounds=5, test=test, progress=False)
    print(f"FedAvg({', '.join(a.name for a in addons)}): {run.accuracy_last:.3f}")
