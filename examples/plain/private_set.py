"""Publish a synthetic set of private images with a differential-privacy guarantee, and see what the guarantee costs."""

from torch import nn

from distillkit import Normalization
from distillkit.data import load
from distillkit.evaluate import evaluate
from distillkit.networks import RandomNetworks
from distillkit.privacy import Ledger, condense_private
from distillkit.training import Protocol

public = Normalization((0.5,), (0.5,))  # constants: the mean and std of private images are private
train, test = load("digits", size=16, normalization=public)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(32, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(32, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, train.num_classes),
    )  # fmt: skip


for epsilon in (1.0, 8.0):
    ledger = Ledger(delta=1e-5, budget=epsilon)  # pass a path to keep the ledger
    small = condense_private(
        train, epsilon=epsilon, ipc=10, networks=RandomNetworks(network), num_networks=5, steps=50, ledger=ledger
    )
    small.save(f"private-{epsilon:g}.safetensors")
    result = evaluate(small, test, network, num_networks=2, protocol=Protocol(epochs=100))
    print(f"{ledger.guarantee()}: accuracy {result.accuracy:.3f}")
