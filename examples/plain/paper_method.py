"""Run a paper's method, FedDM, on your own tensors and network, and compare it with FedAvg."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from distillkit import LabeledImages, Normalization
from fl import FedAvg, FedDM, simulate

# Your tensors: images [N, C, H, W] in [0, 1] and labels [N], split over clients in any way. Here: digits by class.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
half = Normalization((0.5,), (0.5,))  # normalized pixels: (pixels - 0.5) / 0.5
data = LabeledImages(half.encode(images), labels, num_classes=10, normalization=half)
train, test = data[torch.arange(len(data)) % 5 > 0], data[torch.arange(len(data)) % 5 == 0]
client_data = [train[train.labels // 2 == k] for k in range(5)]  # two classes per client


def network(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, outputs),
    )  # fmt: skip


methods = {
    "FedAvg": FedAvg(factory=network, lr=0.1),
    "FedDM": FedDM(factory=network, ipc=10, steps=10, batch_real=64, server_epochs=50, server_lr=0.03),
}
for name, method in methods.items():
    run = simulate(method, client_data, rounds=5, test=test)
    print(name, [f"{row['accuracy']:.3f}" for row in run.rows])
