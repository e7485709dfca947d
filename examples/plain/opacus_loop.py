"""Train with Opacus' PrivacyEngine in a loop of your own, charge its steps to a ledger, and audit the network."""

import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from attacks.audit import one_run_lower_bound
from distillkit import Normalization
from distillkit.data import load
from distillkit.privacy import Ledger
from distillkit.training import accuracy

warnings.filterwarnings("ignore", "Secure RNG turned off|Full backward hook")  # the first: see the guarantee
DELTA, CANARIES, EPOCHS = 1e-4, 300, 3
public = Normalization((0.5,), (0.5,))  # constants: the mean and std of private images are private
train, test = load("digits", size=16, normalization=public)

# The audit's canaries: records with a random label, each of which takes part with probability 1/2.
generator = torch.Generator().manual_seed(0)
images, labels = train.images.clone(), train.labels.clone()
labels[:CANARIES] = torch.randint(10, (CANARIES,), generator=generator)
member = torch.rand(CANARIES, generator=generator) < 0.5
taken = torch.cat([member, torch.ones(len(train) - CANARIES, dtype=torch.bool)])

network = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
    nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
)  # fmt: skip
engine = PrivacyEngine()
private, optimizer, batches = engine.make_private(
    module=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=0.5),
    data_loader=DataLoader(TensorDataset(images[taken], labels[taken]), batch_size=64),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for _ in range(EPOCHS):
    for batch, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(private(batch), targets).backward()
        optimizer.step()

ledger = Ledger(delta=DELTA)  # pass a path to keep the ledger
ledger.charge_history(engine.accountant)
print(ledger.guarantee())
print(f"Opacus' own epsilon: {engine.get_epsilon(DELTA):.3f}")

with torch.no_grad():
    scores = -F.cross_entropy(network(images[:CANARIES]), labels[:CANARIES], reduction="none")
bound = one_run_lower_bound(scores, member, 100, DELTA)
print(f"audit: epsilon is at least {bound:.2f} with 95 % confidence; accuracy {accuracy(network, test):.3f}")
