"""What must hold before the gradients of single examples may be clipped and noised: nothing else lets them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from distillkit.networks import split
from distillkit.networks.dropout import seed_dropout
from distillkit.privacy import BatchStatistics, per_example_gradients
from distillkit.privacy.guards import public_noise, refuse_mixing, refuse_mixing_augmentation, refuse_mixing_loss
from distillkit.sets import LabeledImages
from fl.addon import AddOn, fills
from fl.method import Server
from fl.step import outputs

if TYPE_CHECKING:
    from fl.core import Core

__all__ = ["require_examples_apart", "unsound"]

_DERIVED = {
    "setup": "asks the clients for statistics of their data, which have no noise",
    "dataset": "trains on a set derived from the private images without noise",
    "records": "adds records to the private set, so that other records are drawn than those accounted for",
    "data": "adds images of its own to every step, whose gradient no per-example clip covers",
}
_BESIDE_A_TERM = ("correct", "after", "normalise", "end")


def unsound(addon: AddOn) -> str:
    """Why an add-on would let private data out beside the noised gradients, or ""."""
    for hook, why in _DERIVED.items():
        if fills(addon, hook) and (hook != "setup" or addon.asks):
            return why
    if addon.reads == "batch":
        return "reads the images of a batch together, or more (reads = 'batch'): no clip bounds one record's part"
    beside = [hook for hook in _BESIDE_A_TERM if fills(addon, hook)]
    if addon.reads == "example" and beside:
        return f"reads private examples (reads = 'example') and fills {beside[0]!r}: only a loss term can be clipped"
    return ""


def require_examples_apart(core: Core, server: Server, draws: torch.Generator) -> None:
    """Try networks, augmentation and objective on public noise.

    Raises:
        BatchStatistics, NotSeparable: one of them mixes the examples of a batch, or keeps something of them.
        PrivacyError: a parameter has no per-example gradient.
    """
    classes, count = server.task.num_classes, core.output_count(server.task.num_classes)
    nothing = torch.zeros(0, *server.shape), torch.zeros(0, dtype=torch.int64)
    like = LabeledImages(*nothing, num_classes=classes, normalization=server.normalization)
    labels = torch.tensor([0, 0, 0, 1, 1, classes - 1]) % classes
    if not server.task.single_label:
        labels = F.one_hot(labels, classes).float()
    images, objective = public_noise(len(labels), like, draws), core.objective_of(server.task)
    refuse_mixing_loss(objective, torch.randn(len(labels), count, generator=draws), labels)
    if core.augment is not None:
        refuse_mixing_augmentation(core.augment, images)
    for name in core.networks:
        net = core.templates.draw(name, count, draws)
        seed_dropout(net, draws)
        refuse_mixing(net.eval(), images, f"the network {name}".rstrip())
        _refuse_memory(net.train(), images)
        with per_example_gradients(net) as gradients:
            logits = outputs(split(net), images.requires_grad_()).logits
            gradients(objective(logits, labels).expand(len(labels)))


@torch.no_grad()
def _refuse_memory(net: nn.Module, images: torch.Tensor) -> None:
    before = {n: b.clone() for n, b in net.named_buffers()}
    net(images)
    moved = [n for n, b in net.named_buffers() if not torch.equal(b, before[n])]
    if moved:
        raise BatchStatistics(f"a forward pass changes buffer {moved[0]}: it would carry what no clip bounds")
