"""FedLGD's global anchors: images that the server distills from the mean update, and with which every client trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils.options import Decay, LearningRate, NonNegative, NonNegativeInt, Rounds, Temperature
from distillkit.condense import class_statistics, fit_to_gradient, images_from_statistics
from distillkit.losses import rbf_mmd, supervised_contrastive
from distillkit.sets import LabeledImages
from fl._noise_images import pixel_limit
from fl.addons.condensed import SELECTED
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings, Step
from fl.averaging._composition import require_one_architecture, require_whole_models
from fl.batches import Batch
from fl.message import Entry, Message, Tensors


@dataclass(frozen=True)
class Anchors(AddOn):
    """FedLGD's global anchors (Huang et al., TMLR 2024, sections 3.2 and 3.3.2, Eqs. 2-6, Algorithm 1).

    All clients train with the same few images per class, the anchors, so that their features agree even though their
    data differ. The server keeps a set G of `ipc` labeled images per class.

    In the `selected` rounds, clients train without G (line 17 of Algorithm 1), unless `joined` is "always". The server
    then changes G so that the gradient of the loss on G, with respect to the weights, matches the mean gradient of the
    clients' training (Eqs. 5-6). This mean gradient is (w - mean of w_k) / eta, where w are the weights before the
    round, w_k the weights that client k trained, and eta is the clients' learning rate. Gradients are compared by the
    cosine similarity of each row of a weight tensor (one row per output of a layer).

    In all other rounds, a client adds G to its own data (Eq. 3). Its loss has an additional term: `weight` times the
    supervised contrastive loss over the batch together with all of G (Eqs. 2 and 4, line 20). G is sent only in rounds
    in which clients train on it, and only if it has changed since it was last sent to the client.

    `regulariser="mmd"` is the paper's alternative term (Fig. 3a), in the form of the authors' code (fedlgd_main.py,
    lines 83-85). It is `weight` times the squared MMD between the embeddings of the batch and of G under five Gaussian
    kernels (`losses.rbf_mmd`). It does not use labels, and gradients flow through both sets of embeddings.

    Deviations. The contrastive term is a mean over images, as in the authors' code; Eq. 4 has a sum. `reduction="sum"`
    computes the sum, for which `weight` must be chosen anew. In the authors' code, clients also train on G in the
    selected rounds, so G itself affects the gradient to which it is then fitted. Here, they do so only with
    `joined="always"`.

    The initial G is noise, as in the paper. In the authors' code, its pixels are drawn from normal distributions with
    the mean and standard deviation of each class and channel, averaged over the clients. Each client computes its means
    and standard deviations from sums over the pixels of a class. With `init="statistics"`, these sums are divided by
    the number of pixels of the class; with `init="statistics-whole-set"`, by the number of all pixels of the client, as
    in the authors' code. With these two options, each client is queried once, before round 1. For each class, it sends
    one mean and one standard deviation per channel, and states whether it has the class. Images of classes that no
    client has start from noise.

    Args:
        ipc: number of images per class in G; the paper uses 10. 0 disables the add-on.
        weight: lambda, the weight of the additional term in the clients' loss; the paper uses 10 on DIGITS and 1 on
            CIFAR10C.
        selected: indices of the rounds, from 1, in which the server changes G.
        joined: rounds in which clients train on G: all rounds that are not `selected` ("unselected"), or all rounds
            ("always").
        init: source of the initial G, "noise", "statistics" or "statistics-whole-set".
        steps, lr, momentum: options of the server's SGD on the pixels of G.
        regulariser: additional term in the clients' loss, "contrastive" or "mmd".
        temperature: temperature of the contrastive loss, above 0.
        reduction: reduction of the contrastive loss, "mean" or "sum" over the images of the batch and G.
    """

    disabled_at_zero = ("ipc",)
    ipc: NonNegativeInt = 10
    weight: NonNegative = 1.0
    selected: Rounds = SELECTED
    joined: Literal["unselected", "always"] = "unselected"
    init: Literal["noise", "statistics", "statistics-whole-set"] = "noise"
    steps: NonNegativeInt = 500
    lr: LearningRate = 1.0
    momentum: Decay = 0.5
    regulariser: Literal["contrastive", "mmd"] = "contrastive"
    temperature: Temperature = 0.07
    reduction: Literal["mean", "sum"] = "mean"
    single_label = True
    anchors = Entry[LabeledImages]("first", cached=True)
    owned = Entry[Tensor]("sum")
    statistics = Entry[Tensor]("mean", by=owned)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regulariser == "mmd" and (self.temperature, self.reduction) != (0.07, "mean"):
            raise ValueError(
                "temperature and reduction belong to regulariser='contrastive': leave them out with 'mmd', got "
                f"temperature={self.temperature:g}, reduction={self.reduction!r}"
            )

    @property
    def first_round(self) -> int:  # type: ignore[override]
        """First round in which clients train on the anchors, the server's distilled images."""
        return next(number for number in range(1, len(self.selected) + 2) if self._joins(number))

    @property
    def has_query(self) -> bool:
        """True if the server asks clients for class statistics before round 1, that is, unless `init` is "noise"."""
        return self.init != "noise"

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse more than one architecture, model parameters that stay with the clients, and the optimizer Adam.

        The server computes the mean gradient from the change of the weights. With Adam, this change is not a sum of
        gradients.
        """
        require_one_architecture(self, settings, "it matches the gradient of one model")
        require_whole_models(self, settings, "it matches their gradient on the server")
        if settings.optimizer.name == "adam":
            raise ValueError("Anchors needs optimizer='sgd', got 'adam', whose weight change is not a sum of gradients")

    def start(self, server: AveragingServer) -> None:
        """Draw the pixels of the anchors (the server's labeled images) from N(0, 1)."""
        shape = (server.task.num_classes, server.shape[0])
        self._draw(server, torch.zeros(shape, dtype=server.dtype), torch.ones(shape, dtype=server.dtype))

    def answer(self, local: Local, reply: Message) -> None:
        """Add statistics of the client's images to `reply`, the client's answer to the server's query before round 1.

        For each class, these are the mean and standard deviation of the pixels of each channel, and a number that
        is 1 if the client has images of the class, otherwise 0.
        """
        stats = class_statistics(local.client.data, whole_set=self.init == "statistics-whole-set")
        reply[self.statistics] = torch.cat(stats, 1)
        reply[self.owned] = (local.counts > 0).float()

    def expect_answer(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add two entries to `schema`, which describes a client's answer to the server's query before round 1.

        The first is a row for each class, with the mean and standard deviation of the pixels of each channel. The
        second is a number for each class, which is 1 if the client has images of the class, otherwise 0.
        """
        blank = torch.zeros(server.task.num_classes, 2 * server.shape[0], dtype=server.dtype)
        limit = pixel_limit(server)
        schema[self.statistics.key] = EntrySpec(blank, minimum=-limit, maximum=limit)
        schema[self.owned.key] = EntrySpec(torch.zeros(len(blank)), minimum=0.0, maximum=1.0)

    def receive_answers(self, server: AveragingServer, replies: AggregatedReplies) -> None:
        """Draw the anchors, the server's labeled images, from the clients' answers to the query before round 1.

        Pixels are normally distributed, with the mean and standard deviation of the class and channel, each averaged
        over the clients that have the class. Anchors of classes that no client has are noise, N(0, 1).
        """
        if self.has_query:
            nobody = (replies.weight(self.statistics) == 0).unsqueeze(1)
            means, stds = replies[self.statistics].chunk(2, 1)
            self._draw(server, means, stds.masked_fill(nobody, 1.0))

    def _draw(self, server: AveragingServer, means: Tensor, stds: Tensor) -> None:
        size, generator = server.shape[1:], server.generator(self.key)
        images = images_from_statistics(means, stds, ipc=self.ipc, size=size, generator=generator)
        labels = torch.arange(len(means)).repeat_interleave(self.ipc)
        drawn = LabeledImages(images, labels, num_classes=len(means), normalization=server.normalization)
        server.state[self.anchors] = drawn

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the anchors, the server's labeled images, in rounds in which clients train on them.

        A client that has the same images from an earlier round gets only their digest.
        """
        if self._joins(server.round):
            message[self.anchors] = server.state[self.anchors]

    def _joins(self, round_number: int) -> bool:
        return self.joined == "always" or round_number not in self.selected

    def extra_records(self, local: Local) -> LabeledImages | None:
        """Return the anchors, the server's labeled images, to add to the client's data (Huang et al., 2024, Eq. 3).

        The result is None in rounds in which clients do not train on the anchors.
        """
        if not self._joins(local.round):
            return None
        return local.message[self.anchors]

    def extra_batches(self, local: Local) -> Iterator[Batch] | None:
        """Return an iterator that yields all anchors, the server's labeled images, as one batch in every step.

        `loss` compares this batch with the client's batch. The result is None in the rounds that the option `selected`
        lists, and in all rounds if the option `weight` is 0. In these cases, `loss` adds no term.
        """
        if local.round in self.selected or not self.weight:
            return None
        anchors = local.message[self.anchors]
        return local.stream(self, anchors, batch=len(anchors))

    def loss(self, step: Step) -> Tensor | None:
        """Return `weight` times the term that aligns the client's batch with the anchors, the server's labeled images.

        The option `regulariser` determines the term: the supervised contrastive loss (Huang et al., 2024, Eq. 4), or
        the squared MMD between the embeddings of the client's batch and those of the anchors. The result is None in
        steps without a batch of anchors.
        """
        if not step.has_batch(self):
            return None
        if self.regulariser == "mmd":
            return self.weight * rbf_mmd(step.output().embedding, step.output(self).embedding)
        return self.weight * supervised_contrastive(
            step.output().embedding, step.batch.labels, step.output(self).embedding, step.batch_of(self).labels,
            temperature=self.temperature, detach_other=False, reduction=self.reduction,
        )  # fmt: skip

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """In selected rounds, fit the anchors to the gradient that the clients' mean update implies (Eqs. 5-6)."""
        if server.round not in self.selected or FedAvg.update not in replies:
            return
        name = server.settings.networks.names[0]
        network = server.network(name, server.weights(name, of=old))
        target = {n: -u / server.rate for n, u in replies[FedAvg.update].items()}
        server.state[self.anchors] = fit_to_gradient(
            network, server.state[self.anchors], target, steps=self.steps, lr=self.lr, momentum=self.momentum,
            callback=lambda _: server.check_running(), progress=False,
        )  # fmt: skip
