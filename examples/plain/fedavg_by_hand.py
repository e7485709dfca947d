"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1) in plain loops, next to `fl.simulate`: both give the same bits."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from distillkit.data import clients, load, partition
from distillkit.networks import build
from distillkit.rng import derive
from fl import FedAvg, simulate

torch.set_num_threads(1)  # as `simulate` trains each client; more threads round differently
ROUNDS, EPOCHS, BATCH, LR, SEED = 3, 2, 32, 0.1, 0
train, test = load("digits", size=16)
client_data = clients(train, partition.dirichlet(train.labels, 5, alpha=0.3))


def network(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, outputs),
    )  # fmt: skip


net = build(lambda: network(10), SEED)  # the same first weights for both
first = copy.deepcopy(net.state_dict())

w = first  # the server's weights
n = sum(len(data) for data in client_data)
for t in range(1, ROUNDS + 1):
    changes = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in w.items()}
    for k, (images, labels) in enumerate(client_data):
        net.load_state_dict(w)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        generator = derive(SEED, t, k, "batches0")
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(images), generator=generator).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(images[batch]), labels[batch]).backward()
                optimizer.step()
        for name, w_k in net.state_dict().items():
            changes[name] += len(images) * (w_k - w[name]).double()
    w = {name: value + (changes[name] / n).to(value.dtype) for name, value in w.items()}  # w + sum_k n_k / n (w_k - w)

method = FedAvg(factory=network, initial=first, lr=LR, epochs=EPOCHS, batch=BATCH)
run = simulate(method, client_data, rounds=ROUNDS, test=test, seed=SEED)
equal = all(torch.equal(w[name], value) for name, value in run.models[""].state_dict().items())
print(f"accuracy {run.accuracy_last:.3f}; the weights by hand are {'equal' if equal else 'different'}")
