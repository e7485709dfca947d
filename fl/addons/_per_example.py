"""What must hold before the gradients of single examples may be clipped and noised: nothing else lets them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from distillkit.privacy.guards import public_trial, refuse_mixing_augmentation, refuse_mixing_loss
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.averaging.addon import AddOn, fills
from fl.averaging.local import Local
from fl.method import Client, Server
from fl.task import Task

if TYPE_CHECKING:
    from fl.averaging.core import Core
    from fl.averaging.fedavg import FedAvg

__all__ = ["public_examples", "refuse_mixing_parts", "trial_locals", "unsound"]

_DERIVED = {
    "answer": "asks the clients for statistics of their data, which have no noise",
    "dataset": "trains on a set derived from the private images without noise",
    "extra_records": "adds records to the private set, so that other records are drawn than those accounted for",
    "own_batches": "adds images of its own to every step, whose gradient no per-example clip covers",
}
_BESIDE_A_TERM = ("correct_gradient", "after_step", "normalise", "end")


def unsound(addon: AddOn) -> str:
    """Why an add-on would let private data out beside the noised gradients, or ""."""
    for hook, why in _DERIVED.items():
        if fills(addon, hook) and (hook != "answer" or addon.asks):
            return why
    if addon.reads == "batch":
        return "reads the images of a batch together, or more (reads = 'batch'): no clip bounds one record's part"
    beside = [hook for hook in _BESIDE_A_TERM if fills(addon, hook)]
    if addon.reads == "example" and beside:
        return f"reads private examples (reads = 'example') and fills {beside[0]!r}: only a loss term can be clipped"
    return ""


def refuse_mixing_parts(core: Core, server: Server, draws: torch.Generator) -> None:
    """Try augmentation and objective on public noise.

    Raises:
        BatchStatistics, NotSeparable: one of them mixes the examples of a batch.
    """
    data = _noise(server.task, _like(server), draws)
    count = core.output_count(server.task.num_classes)
    logits = torch.randn(len(data), count, generator=draws).to(data.images.device)
    refuse_mixing_loss(core.objective_of(server.task), logits, data.labels)
    if core.augment is not None:
        refuse_mixing_augmentation(core.augment, data.images)


def trial_locals(core: FedAvg, server: Server, draws: torch.Generator) -> Iterator[Local]:
    """For each architecture that a client has, that client's local training as it begins, with noise for its data."""
    first = {core.architecture(k): k for k in reversed(range(server.clients))}
    for number in first.values():
        data = _noise(server.task, _like(server), draws)
        client = Client(number, data, None, server.task, 1, server.seed, device=server.device)
        message = core.send(server, number)
        if any(a.keeps_previous for a in core.addons):
            client.memory[core.last] = core.state_for(client, message)
        local = Local(core, client, message)
        for addon in core.addons:
            addon.begin(local)
        yield local


def public_examples(local: Local) -> list[torch.Tensor]:
    """Six noise images in the client's space, with labels, and a column of ones for each of its columns."""
    data = _noise(local.task, local.data, derive(local.client.seed, "trial"))
    columns = [local.data.columns[name] for name in sorted(local.data.columns)]
    ones = [c.new_ones((len(data), *c.shape[1:])) for c in columns]
    return [t.to(local.client.device) for t in (data.images, data.labels, *ones)]


def _like(server: Server) -> LabeledImages:
    nothing = torch.zeros(0, *server.shape, device=server.device), torch.zeros(0, dtype=torch.int64)
    return LabeledImages(*nothing, num_classes=server.task.num_classes, normalization=server.normalization)


def _noise(task: Task, like: LabeledImages, draws: torch.Generator) -> LabeledImages:
    classes = task.num_classes
    labels = torch.tensor([0, 0, 0, 1, 1, classes - 1]).to(like.images.device) % classes
    if not task.single_label:
        labels = F.one_hot(labels, classes).float()
    return LabeledImages(
        public_trial(len(labels), like, draws), labels, num_classes=classes, normalization=like.normalization
    )
