"""FedProto: clients send only class prototypes, that is, mean embeddings, and keep their own networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit._utils.batches import require_batch_statistics, uses_batch_statistics
from distillkit._utils.options import Decay, NonNegative, Positive, PositiveInt, check_options
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.losses import class_means, prototype_distance
from distillkit.networks import split
from distillkit.networks._dropout import seed_dropout
from fl._components import stable_repr
from fl.addons.condensed import Condensed
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging.settings import learning_rate
from fl.batches import batch_at, shuffled_indices
from fl.message import Entry, Message, Tensors
from fl.method import Method, Predictor, evaluation_spec, require_single_label
from fl.networks import Factory, Networks, copied, embedding_size
from fl.participants import Client, Server
from fl.schema import MAX_WEIGHT


@dataclass(kw_only=True, eq=False, repr=False)
class FedProto(Method):
    """Federated prototype learning (Tan et al., "FedProto", AAAI 2022, Algorithm 1).

    In each round, a client trains its own network, which is never sent. Its loss is the cross-entropy plus `lam` times
    the squared distance of each embedding to the global prototype of its class. Then the client sends the mean
    embedding of each of its classes. The server averages them over the clients to get the new global prototypes. A
    class that no client sent keeps its prototype. The clients' networks may differ as long as their embeddings have the
    same size. Networks of the same architecture start from the same initial weights. There is no global model, so
    `accuracy` in the history is the mean over the clients' own models.

    Deviations. The paper's aggregation takes the mean weighted by image counts, and then divides this mean by the
    number of clients that have the class. That division would shrink the prototypes, so it is left out
    (`weights="samples"`). The authors' code takes the plain mean over the clients that have the class
    (`weights="uniform"`). The distance to the prototypes is computed for each image; the paper computes it for the
    class means of a batch (see `distillkit.losses.prototype_distance`). Prototypes are computed in eval mode after
    training; the authors' code averages the embeddings seen during training.

    Args:
        factory: function that takes the number of classes and returns a network; or, for several architectures, a
            mapping from the name of each architecture to its function.
        assign: mapping or function from a client's index to the name of its architecture. Required if there are several
            architectures, and refused otherwise.
        lam: weight of the distance to the prototypes, at least 0. The paper uses 1. The authors' code also averages the
            distance over the d dimensions of the embedding, which corresponds to `lam=1/d` here. For large d, `lam=1`
            makes the embeddings collapse. With `lam=0`, the networks are only trained locally.
        lr, momentum, weight_decay: options of SGD on the clients; the authors' code uses learning rate 0.01 and
            momentum 0.5.
        epochs: number of passes over the local data in a round.
        batch: number of images per step.
        weights: weight of a client's mean embedding of a class in the average: its number of images of the class
            ("samples"), or 1 ("uniform").
        max_samples: with "samples", the largest number of images of a class that a client may report. Replies with
            larger numbers are refused.
        predict: prediction that is tested: the class of the nearest prototype ("prototype", as in the paper), or that
            of the client's own classifier ("classifier").
        condensed: a `Condensed(refine_steps=0, ...)`, with which each client condenses its data once, and uses the
            condensed set for training and prototypes. FedLGD's tables report FedProto in this form (Huang et al., TMLR
            2024, section 5.1). None: clients use their own images.

    Raises:
        TypeError, ValueError: an option has a wrong type or is out of range. The message names the option.
    """

    prototypes = Entry[Tensor]("first")
    known = Entry[Tensor]("first")
    count = Entry[Tensor]("sum")
    means = Entry[Tensor]("mean", by=count)
    own = Entry[Tensors]("first")
    tested = Entry[Tensors]("sum")

    factory: Factory | Mapping[str, Factory]
    assign: Mapping[int, str] | Callable[[int], str] | None = None
    lam: NonNegative = 1.0
    lr: float = 0.01
    momentum: Decay = 0.5
    weight_decay: NonNegative = 0.0
    epochs: PositiveInt = 1
    batch: PositiveInt = 32
    weights: Literal["samples", "uniform"] = "samples"
    max_samples: Positive = MAX_WEIGHT
    predict: Literal["prototype", "classifier"] = "prototype"
    condensed: Condensed | None = None

    def __post_init__(self) -> None:
        vars(self).update(check_options(self), lr=learning_rate(self.lr, "lr"))
        self.networks = Networks(self.factory, self.assign)
        if self.condensed is not None and not isinstance(self.condensed, Condensed):
            raise TypeError(f"condensed must be a Condensed(refine_steps=0, ...), got {stable_repr(self.condensed)}")
        if self.condensed is not None and self.condensed.refine_steps and self.condensed.selected:
            raise ValueError(
                "FedProto has no global network with which to refine sets: give Condensed(refine_steps=0), got "
                f"refine_steps={self.condensed.refine_steps}"
            )
        if self.condensed is not None and self.condensed.disabled:
            self.condensed = None

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the constructor's positional arguments (none) and its named arguments, for the record of a run.

        `factory` and `assign`, which determine the networks of the clients, are left out, because the record describes
        these networks separately.
        """
        return (), {k: v for k, v in vars(self).items() if k not in ("factory", "assign", "networks")}

    def check_run(self, server: Server, rounds: int) -> None:
        """Test every architecture on noise images, and refuse options that do not fit the clients.

        The option `assign` must give every client the name of its architecture, and the augmentation of the option
        `condensed` must fit the clients' images.
        """
        self.networks.check_run(server, features=True)
        if self.condensed is not None:
            self.condensed.start(server)

    def start(self, server: Server) -> None:
        """Determine the length of the embeddings, and store an empty table of prototypes in the server's state.

        Raises:
            ValueError: the task has several classes per image, or the architectures' embeddings differ in size.
        """
        require_single_label("FedProto", server.task)
        classes, blank = server.task.num_classes, torch.zeros(1, *server.shape, dtype=server.dtype)
        draw = partial(self.networks.draw, classes=classes, generator=torch.Generator())
        sizes = {name: embedding_size(draw(name), blank) for name in self.networks.names}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"factory: the architectures' embeddings must have one size to share prototypes, got {sizes}"
            )
        server.state[self.prototypes] = torch.zeros(classes, max(sizes.values()), dtype=server.dtype)
        server.state[self.known] = torch.zeros(classes, dtype=torch.bool)

    def send(self, server: Server, client: int) -> Message:
        """Return a message with the global prototypes and, for each class, whether it has a prototype yet."""
        return Message({e: server.state[e] for e in (self.prototypes, self.known)})

    def _network(self, client: Client) -> nn.Module:
        own = client.memory.get(self.own)
        if own is None:
            own = self.networks.first(self.networks.architecture(client.id), client.task.num_classes, client.seed)
        return self.networks.on(client, own)

    def local(self, client: Client, message: Message) -> Message:
        """Train the client's own network, then send the mean embedding of each class (LocalUpdate of Algorithm 1)."""
        net, data = self._network(client), client.data
        if self.condensed is not None:
            data = self.condensed.first(client, lambda: self._network(client))
        seed_dropout(net, client.generator("dropout"))
        network, prototypes, known = split(net), message[self.prototypes], message[self.known]
        optimizer = torch.optim.SGD(net.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay)
        net.train()
        require_batch_statistics(net, data.images, min(self.batch, len(data)), "factory")
        order, merge_single = client.generator("batches"), uses_batch_statistics(net)
        for index in shuffled_indices(len(data), self.batch, order, self.epochs, None, merge_single, data.images):
            client.check_running()
            batch = batch_at(data, index)
            labels, z = batch.labels, network.features(batch.images)
            distance = prototype_distance(z, labels, prototypes, known)
            loss = client.task.loss(network.classifier(z), labels) + self.lam * distance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        client.memory[self.own] = copied(net)
        net.eval()
        z = torch.cat(list(forward_chunks(network.features, data.images, chunk_size(data.images))))
        means, counts = class_means(z, data.labels, client.task.num_classes)
        weight = counts if self.weights == "samples" else counts.clamp(max=1)
        return Message({self.count: weight.to(means.dtype), self.means: means})

    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a reply: a mean embedding and a weight for every class, both 0 for a class that the
        client lacks.
        """
        prototypes = server.state[self.prototypes]
        most = self.max_samples if self.weights == "samples" else 1.0
        return {
            self.count.key: EntrySpec(prototypes[:, 0], minimum=0.0, maximum=most),
            self.means.key: EntrySpec(prototypes),
        }

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Set the global prototype of each class to the weighted mean of the prototypes that clients sent.

        A class for which no client sent a prototype keeps its global prototype.
        """
        means = replies[self.means]
        owned = replies.weight(self.means) > 0
        server.state[self.prototypes] = torch.where(owned[:, None], means, server.state[self.prototypes])
        server.state[self.known] = server.state[self.known] | owned
        server.notes["prototypes"] = int(server.state[self.known].sum())

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the client's own network on its test images. The name of the results is "personal".

        With `predict="prototype"`, the predicted class is that of the nearest global prototype. Otherwise, the
        network's classifier predicts the class.
        """
        if client.test is None or not len(client.test):
            return Message()
        net = self._network(client).eval()
        if self.predict == "prototype":
            net = _Nearest(net, message[self.prototypes], message[self.known]).eval()
        return Message({self.tested: {"personal": Predictor(net).sums(client.test, client.task)}})

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Return the schema of the results of `evaluate`: `LabelTask.sums` of the personal model."""
        return {self.tested.key: evaluation_spec(server.task, "personal")}


class _Nearest(nn.Module):
    """Classifier that predicts the class of the nearest prototype. Its logits are negative squared distances."""

    def __init__(self, network: nn.Module, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.network, self.prototypes, self.known = split(network), prototypes, known

    def forward(self, images: Tensor) -> Tensor:
        distance = torch.cdist(self.network.features(images), self.prototypes).square()
        return torch.where(self.known, -distance, torch.finfo(distance.dtype).min)
