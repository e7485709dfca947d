"""Attack a condensed set to find out from which records it was made."""

import torch
from torch import nn

from attacks import roc
from attacks.membership import nearest
from distillkit import LabeledImages
from distillkit.condense import distribution_matching
from distillkit.data import load
from distillkit.networks import RandomNetworks

members, outsiders = load("digits", size=16)  # the condensed set is made from `members` only
candidates = LabeledImages.concatenate([members, outsiders])
is_member = torch.arange(len(candidates)) < len(members)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(32, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(32, 32), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, members.num_classes),
    )  # fmt: skip


for init in ("real", "noise"):
    small = distribution_matching(members, networks=RandomNetworks(network), ipc=10, steps=50, batch_real=64, init=init)
    scores = nearest(small.images, candidates.images)  # higher: more likely a member
    print(f"init={init!r}:", roc(scores, is_member).at(0.05))
