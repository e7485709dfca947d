"""Comparison of the gradient of a synthetic set, or the update of a round, with the gradient of real images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.options import NonNegativeInt, PositiveInt
from distillkit.losses import gradient_distance
from distillkit.networks import ConvNet, initialize
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.training import Protocol, train
from fl.aggregation import Schema
from fl.filters.filter import Filter
from fl.message import Entry, Tensors
from fl.method import Method, Predictor, evaluation_batch_size
from fl.networks import copied
from fl.participants import Server


@dataclass(frozen=True)
class SetQuality(Filter):
    """Measurement of how well the gradient of a synthetic set, or a round's update, matches the gradient of real
    images.

    FedDM claims that the union of the clients' synthetic sets approximates real images. FedLGD claims that the server's
    synthetic images (anchors) approximate updates. Use the filter to check these claims, and to compare the synthetic
    images with an equally large set of real images. The results are in the column `set_quality` of the history, under
    the names listed below. The gradient of a set is that of the cross-entropy on the set, with respect to the weights.
    The distance of a set from another set, or from the update, is computed between gradients:

    * `update_real`: distance of the round's update from the gradient of the real images in `on`.
    * `sample_real`, `sample_update`: distance of a random sample of `on` from the other images in `on`, and from the
      update. The sample has as many images per class as the synthetic set, but at most half of the images of a class.
    * `set_real`, `set_update` (only if `entry` is given): distance of the synthetic set from the images in `on`
      that are not in the sample, and from the update.
    * `named` (only with a `judge`): share of the synthetic images for which the judge predicts the image's label. The
      judge is a network that is trained on the images in `on`.

    The update is the old minus the new global weights. All gradients are computed at the weights at the start of the
    round. A distance is the mean of 1 - cosine similarity over the rows of the weight tensors: the `row_cosine` of
    `losses.gradient_distance`, divided by the number of rows. It is in [0, 2], and 1 for unrelated gradients.

    The filter does not change the training, and no additional values are sent. Compare only methods that were measured
    with the same `on`. FedLGD's anchors are fitted to the update (Huang et al., TMLR 2024, Eq. 5), and FedDM's union to
    the real images (Xiong et al., CVPR 2023, Eqs. 2-6). Neither paper reports these distances.

    Args:
        entry: entry of the server's state that holds the synthetic set after the round, such as `Anchors.anchors` or
            `FedDM.images`. None: the method has no set, and only updates and samples are measured.
        on: name of the real images in `server_data`.
        per_class: number of images per class in the sample, if `entry` is None.
        every: number of rounds between two measurements. A measurement costs about two passes over `on`.
        judge: number of epochs for which the judge, a `ConvNet` of two blocks, is trained before round 1; 0: no judge.

    Raises:
        ValueError: the run has no images `on`, the method has not exactly one global model, or an option is out of
            range.
    """

    entry: Entry[LabeledImages] | None = None
    on: str = "proxy"
    per_class: PositiveInt = 10
    every: PositiveInt = 1
    judge: NonNegativeInt = 0

    trained = Entry[Tensors]("first")

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Raise ValueError if the server has no image set with the name given by the option `on`.

        If the options `judge` and `entry` are set, also train the judge, a network that later predicts the labels of
        the synthetic images.
        """
        if self.on not in server.data:
            raise ValueError(f"SetQuality needs real images on the server: server_data={{{self.on!r}: ...}}")
        if self.entry is not None and self.judge:
            network = self._judge(server)
            initialize(network, derive(server.seed, self.key, "judge"))
            protocol, order = Protocol(epochs=self.judge, batch=64), derive(server.seed, self.key, "judge's order")
            server.state[self.trained] = copied(train(network, server.data[self.on], protocol, generator=order,
                                                      progress=False))  # fmt: skip

    def _judge(self, server: Server) -> nn.Module:
        network = ConvNet(server.shape, server.task.num_classes, width=32, depth=2)
        return network.to(server.device, server.dtype)

    def after_receive(self, server: Server, before: Server, method: Method) -> None:
        """Measure the quantities of `SetQuality`, and write them into the history.

        Measure only in rounds whose number is a multiple of the option `every`.
        """
        if server.round % self.every:
            return
        old, new = (_global_model(method, one) for one in (before, server))
        made = None if self.entry is None else server.state.get(self.entry)
        sample, rest = self._split(server, made)
        moved = dict(new.network.named_parameters())
        update = [p.detach() - moved[n].detach() for n, p in old.network.named_parameters()]
        real, few = (_gradient(old, images) for images in (rest, sample))
        found = {"update_real": _distance(update, real), "sample_real": _distance(few, real)}
        found["sample_update"] = _distance(few, update)
        if made is not None and len(made):
            own = _gradient(old, made)
            found |= {"set_real": _distance(own, real), "set_update": _distance(own, update)}
            if self.judge:
                judge, weights = self._judge(server).eval(), server.state[self.trained]
                judge.load_state_dict(weights)
                found["named"] = server.task.metrics(Predictor(judge).sums(made, server.task))["accuracy"]
        server.notes["set_quality"] = found

    def _split(self, server: Server, made: LabeledImages | None) -> tuple[LabeledImages, LabeledImages]:
        """Split the real images into a random sample and the rest."""
        data, classes = server.data[self.on], server.task.num_classes
        counts = torch.full((classes,), self.per_class) if made is None else made.labels.bincount(minlength=classes)
        order = torch.randperm(len(data), generator=server.generator(f"{self.key} sample"))
        chosen = torch.zeros(len(data), dtype=torch.bool)
        for label, count in enumerate(counts.tolist()):
            own = order[data.labels.cpu()[order] == label]
            chosen[own[: min(count, len(own) // 2)]] = True
        return data[chosen.nonzero().flatten()], data[(~chosen).nonzero().flatten()]


def _global_model(method: Method, server: Server) -> Predictor:
    models = method.predictors(server)
    if len(models) != 1:
        raise ValueError(f"SetQuality needs one global model, {type(method).__name__} has {len(models)} here")
    return next(iter(models.values()))


@torch.enable_grad()
def _gradient(model: Predictor, data: LabeledImages) -> list[Tensor]:
    """Return the gradient of the mean cross-entropy over the images, one tensor for each parameter of the model."""
    network = model.network.requires_grad_(True)
    parameters, chunk = list(network.parameters()), evaluation_batch_size(data.shape, data.images.device)
    total = [torch.zeros_like(p) for p in parameters]
    for start in range(0, len(data), chunk):
        logits = network(data.images[start : start + chunk])[:, : model.outputs]
        loss = F.cross_entropy(logits, data.labels[start : start + chunk], reduction="sum") / len(data)
        for one, gradient in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True)):
            one += 0 if gradient is None else gradient
    return total


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the mean of 1 - cosine similarity over corresponding rows of two gradients, in [0, 2].

    A gradient consists of one tensor for each parameter of a network. A row is the part of a tensor that belongs to one
    output of the layer. Tensors with one dimension, such as biases, are ignored.
    """
    rows = sum(len(g) for g in one if g.ndim > 1)
    return float(gradient_distance(one, other, eps=0.0)) / max(1, rows)
