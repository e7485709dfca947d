"""FedDM: clients send small synthetic sets that approximate their loss, and the server trains on all of these sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit._utils.options import Decay, LearningRate, NonNegative, Positive, PositiveInt, check_options
from distillkit.augment import require_augmentation
from distillkit.networks import NetworkBall
from distillkit.sets import LabeledImages
from fl._noise_images import empty_set, pixel_limit
from fl.addons._server_training import Projection, train_on_set
from fl.addons.condensed import condense_client
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging._trials import try_augmentation
from fl.averaging.settings import learning_rate
from fl.message import Entry, Message, Tensors
from fl.method import Method, NoUsableReply, Predictor, evaluation_spec, require_single_label
from fl.networks import Factory, Networks, copied
from fl.participants import Client, Server
from fl.schema import MAX_WEIGHT


@dataclass(kw_only=True, eq=False, repr=False)
class FedDM(Method):
    """Federated learning with iterative distribution matching (Xiong et al., CVPR 2023, Algorithm 1).

    In each round, a client optimizes `ipc` synthetic images for each of its classes so that their mean embeddings and
    mean logits match those of its real images (Eq. 8). The embeddings and logits are computed with networks drawn at
    random at distance rho from the received weights (`NetworkBall`). The server then trains its weights on the union of
    all clients' synthetic images, and keeps them within distance rho of the weights that it sent (section 4.4).

    Options and deviations. In Eq. 9, every synthetic image has the same weight in the server's loss
    (`weights="synthetic"`). Eq. 9 approximates Eq. 2, which weights clients by their numbers of real images. With
    `weights="samples"`, the server uses Eq. 2, and clients also send these numbers. For the server's optimizer, the
    paper states only the learning rate. Momentum .9 and weight decay 5e-4 are taken from a public re-implementation,
    which does not project the weights to the ball (`project=False`). The paper specifies neither an augmentation nor
    the momentum for the images; the defaults are no augmentation, and .5 as in DM. Initial images are drawn with
    replacement for a class with fewer images than `ipc`.

    Args:
        factory: function that takes the number of classes and returns a network.
        ipc: number of images that a client sends for each of its classes; the paper uses 10 (5 on CIFAR-100).
        steps: T, the number of matching steps in a round; the paper uses 1,000.
        rho: radius of the ball; the paper uses 5.
        init: source of the initial images, "real" or "noise".
        match: outputs to match, "embedding+logits" (Eq. 8) or "embedding".
        batch_real: number of real images per class in each step.
        lr, momentum: learning rate and momentum of SGD on the synthetic images.
        augment: differentiable Siamese augmentation of real and synthetic images, or None.
        server_epochs, server_batch, server_lr, server_momentum, server_weight_decay: options of SGD on the server.
        project: whether the server's weights are kept within distance rho of the weights at the start of the round.
        weights: weights of the synthetic images in the server's loss: equal ("synthetic", Eq. 9), or the client's
            number of real images, divided equally among its synthetic images ("samples", Eq. 2).
        max_samples: with "samples", the largest number of real images that a client may report. Replies with larger
            numbers are refused.

    Raises:
        TypeError, ValueError: an option has a wrong type or is out of range. The message names the option.
    """

    model = Entry[Tensors]("first")
    images = Entry[LabeledImages]("union")
    samples = Entry[Tensor]("union")
    tested = Entry[Tensors]("sum")

    factory: Factory
    ipc: PositiveInt = 10
    steps: PositiveInt = 1000
    rho: Positive = 5.0
    init: Literal["real", "noise"] = "real"
    match: Literal["embedding+logits", "embedding"] = "embedding+logits"
    batch_real: PositiveInt = 256
    lr: LearningRate = 1.0
    momentum: Decay = 0.5
    augment: Callable[..., Tensor] | None = None
    server_epochs: PositiveInt = 500
    server_batch: PositiveInt = 256
    server_lr: float = 0.01
    server_momentum: Decay = 0.9
    server_weight_decay: NonNegative = 5e-4
    project: bool = True
    weights: Literal["synthetic", "samples"] = "synthetic"
    max_samples: Positive = MAX_WEIGHT

    def __post_init__(self) -> None:
        vars(self).update(check_options(self), server_lr=learning_rate(self.server_lr, "server_lr"))
        self.networks = Networks(self.factory, several=False)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the constructor's positional arguments (none) and its named arguments, for the record of a run.

        `factory`, the function that builds the network, is left out, because the record describes the network
        separately.
        """
        return (), {k: v for k, v in vars(self).items() if k not in ("factory", "networks")}

    def check_run(self, server: Server, rounds: int) -> None:
        """Test the network on noise images, and check the augmentation.

        An augmentation that was created for another normalization than that of the clients' images is refused.
        """
        require_augmentation(self.augment, server.normalization)
        try_augmentation(server, self.augment)
        self.networks.check_run(server, features=True)

    def start(self, server: Server) -> None:
        """Draw the network's initial weights from the run's seed, and store them in the server's state.

        Raises:
            ValueError: the task has several classes per image.
        """
        require_single_label(type(self).__name__, server.task)
        server.state[self.model] = self.networks.all_first(server)

    def send(self, server: Server, client: int) -> Message:
        """Return a message with the server's current weights."""
        return Message({self.model: server.state[self.model]})

    def synthesize(self, client: Client, network: nn.Module) -> LabeledImages:
        """Return the set that a client sends in a round: the paper's synthetic set S_k. Subclasses send other sets.

        Args:
            client: client whose data the set represents.
            network: network with the received weights, in eval mode.
        """
        return condense_client(
            self, client, client.data, NetworkBall(network, self.rho), client.generator("images"),
            "images", steps=self.steps, match=self.match, init=self.init,
        )  # fmt: skip

    def local(self, client: Client, message: Message) -> Message:
        """Make the client's synthetic set, and reply with its pixels and labels (ClientUpdate in Algorithm 1).

        With `weights="samples"`, the reply also has the client's number of real images.
        """
        net = self.networks.on(client, message[self.model])
        synthetic = self.synthesize(client, net.eval()).replace(columns={}, info={})
        reply = Message({self.images: synthetic})
        if self.weights == "samples":
            reply[self.samples] = self.weight_of(client, synthetic)
        return reply

    def weight_of(self, client: Client, synthetic: LabeledImages) -> Tensor:
        """Return the weight that a client sends with `weights="samples"`: its number of real images, float [1].

        Args:
            client: client that sends the images.
            synthetic: set that the client sends.
        """
        return torch.tensor([float(len(client.data))])

    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a reply: an image set and, with `weights="samples"`, the client's weight.

        The set has at most `ipc` images per class. Its metadata (`info`) must be empty, because the metadata could show
        which classes a client lacks.
        """
        most, limit = self.ipc * server.task.num_classes, pixel_limit(server)
        schema: Schema = {
            self.images.key: EntrySpec(
                empty_set(server),
                max_rows=most,
                max_per_class=self.ipc,
                minimum=-limit,
                maximum=limit,
            )
        }
        if self.weights == "samples":
            schema[self.samples.key] = EntrySpec(torch.zeros(1), minimum=0.0, maximum=self.max_samples)
        return schema

    def weigh(self, replies: AggregatedReplies) -> Tensor:
        """Return the weight of each synthetic image in the server's loss, float [N] with mean 1.

        Args:
            replies: aggregated replies, with the union of the clients' sets.

        Raises:
            NoUsableReply: the weights of all clients are zero.
        """
        union = replies[self.images]
        weight = union.labels.new_ones(len(union), dtype=torch.float32)
        if self.weights == "samples":
            client = union.columns["client"]
            for number, count in zip(replies.clients, replies[self.samples].tolist()):
                own = client == number
                weight[own] = count / max(1, int(own.sum()))
            if len(union) and not float(weight.sum()) > 0:
                raise NoUsableReply("all weights of the round's replies are zero")
            weight *= len(weight) / weight.sum()
        return weight

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Train the server's weights on the union of the clients' sets (the server's part of Algorithm 1)."""
        self.train(server, replies[self.images], self.weigh(replies))

    def train(self, server: Server, union: LabeledImages, weight: Tensor) -> None:
        """Train the server's weights by SGD on the union of the clients' sets (Eq. 9), and store both in the server's
        state.

        Args:
            server: server whose state holds the weights before this round.
            union: union of the clients' sets.
            weight: weight of each image, float [N] with mean 1.

        Raises:
            NoUsableReply: the union has no images.
        """
        if not len(union):
            raise NoUsableReply("no reply of the round holds an image")
        net = self.networks.on(server, server.state[self.model]).train()
        optimizer = torch.optim.SGD(
            net.parameters(), lr=self.server_lr, momentum=self.server_momentum, weight_decay=self.server_weight_decay
        )
        train_on_set(
            net, union, optimizer, epochs=self.server_epochs, batch=self.server_batch, order=server.generator("train"),
            dropout=server.generator("dropout"), check_running=server.check_running, weight=weight,
            after_step=Projection(net, self.rho) if self.project else lambda: None,
        )  # fmt: skip
        server.state[self.model] = copied(net)
        server.state[self.images] = union
        server.notes["synthetic_images"] = len(union)

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """Return a mapping from "" to the only global model, which has the server's current weights."""
        net = self.networks.on(server, server.state[self.model])
        return {"": Predictor(net.eval().requires_grad_(False))}

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the received model ("global") on the client's own test images."""
        if client.test is None or not len(client.test):
            return Message()
        net = self.networks.on(client, message[self.model])
        return Message({self.tested: {"global": Predictor(net.eval()).sums(client.test, client.task)}})

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Return the schema of the results of `evaluate`: `LabelTask.sums` of the received model."""
        return {self.tested.key: evaluation_spec(server.task, "global")}
