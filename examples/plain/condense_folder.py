"""Condense a folder of your own images (one sub-folder per class) to ten images per class."""

from torch import nn

from distillkit import plot
from distillkit.condense import distribution_matching
from distillkit.data import load_folder
from distillkit.evaluate import evaluate
from distillkit.networks import RandomNetworks
from distillkit.training import Protocol

FOLDER = "my-images"
SIZE = 32

train, test = load_folder(FOLDER, size=SIZE)


def network() -> nn.Module:
    channels = train.shape[0]
    layers = []
    for width in (32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(width, width), nn.ReLU(), nn.AvgPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, train.num_classes))


small = distribution_matching(train, networks=RandomNetworks(network), ipc=10, steps=100, batch_real=64)
small.save("small.safetensors")
plot.grid(small).savefig("small.png")
print(evaluate(small, test, network, real=train, num_networks=2, protocol=Protocol(epochs=50)))
