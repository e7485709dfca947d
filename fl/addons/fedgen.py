"""FedGen: a generator of embeddings, learned from the clients' classifiers, regularizes local training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils.options import AtLeastTwo, LearningRate, NonNegative, Positive, PositiveInt
from distillkit.losses import knowledge_distillation
from distillkit.networks import build
from fl.addons._latent import Head, LatentGenerator, diversity
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings, Step
from fl.averaging._composition import require_one_architecture, require_unscaled, require_whole_models
from fl.averaging.optimizer import load_state, saved_state
from fl.message import Entry, Message, Tensors
from fl.networks import copied


@dataclass(frozen=True)
class FedGen(AddOn):
    """Data-free knowledge distillation for heterogeneous federated learning (Zhu et al., ICML 2021, Algorithm 1).

    Clients share the knowledge of their classifiers through a generator of embeddings; no images are exchanged.

    The server trains a generator G so that the clients' classifiers h_k assign the embedding z = G(y, noise) to class
    y. It minimizes

        sum_k mean_y [a_k(y) CE(h_k(z), y)] + diversity_weight * diversity(noise, z),

    where CE is the cross-entropy and a_k(y) is client k's share of the counts of class y. The last term is small if
    different noise leads to different embeddings. A client's count of a class is one plus the number of images of the
    class in the batches of its training. A class of which no client had an image in a round is not generated in that
    round. From the second round on, clients receive G and add to their loss

        alpha_t mean_y CE(h(G(y)), y) + beta_t mean_x KL(softmax(h(G(y_x))) || softmax(logits of x)),

    where h is the classifier in training, and y is uniform over the classes for which G has been trained so far. x is
    an image of the batch and y_x its class. The softmax of h(G(y_x)) is treated as a constant. In each step, a client
    generates as many embeddings for each of the two terms as the batch has images. Both weights, alpha_t and beta_t,
    decay by the factor `decay` in each round.

    Both formulas and the counts follow the authors' code (zhuangdizhu/FedGen: FLAlgorithms/servers/serverpFedGen.py and
    users/userpFedGen.py). The paper has the cross-entropy of the mean logits in the first formula and no KL in the
    second.

    Deviations from the code. Noise is Gaussian, as in the paper; in the code it is uniform. Here, the clients' two
    terms leave out the classes for which G has not been trained. The code has a further term in the generator's loss,
    whose weight is 0 in all its settings; here, there is no such term. The code adds the clients' two terms only in the
    first 20 local epochs; here, they are added in all epochs.

    Args:
        alpha, beta: weights of the two terms on the clients, at least 0; the code uses 10 for both (1 on EMNIST).
        decay: factor by which alpha, beta and the generator's learning rate `lr` change per round; the code uses 0.98.
        steps, batch, lr, weight_decay: options of Adam on the generator in each round; the code uses 50, 32, 3e-4 and
            0.01.
        diversity_weight: weight of the diversity term in the generator's loss, at least 0; the code uses 1.
        noise, hidden: lengths of the generator's noise and hidden layer; the code uses 32 and 256 on MNIST.
    """

    disabled_at_zero = ("alpha", "beta")
    alpha: NonNegative = 10.0
    beta: NonNegative = 10.0
    decay: Positive = 0.98
    steps: PositiveInt = 50
    batch: AtLeastTwo = 32
    lr: LearningRate = 3e-4
    weight_decay: NonNegative = 0.01
    diversity_weight: NonNegative = 1.0
    noise: PositiveInt = 32
    hidden: PositiveInt = 256

    generator = Entry[Tensors]("first")
    seen = Entry[Tensor]("first")
    optimizer = Entry[Tensors]("first")
    counts = Entry[Tensor]("union")
    head = Entry[Tensors]("union")
    single_label = True
    first_round = 2

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse several architectures in a run, parameters that stay with the clients, and add-ons that rescale
        updates.

        The generator learns from the clients' classifiers. Therefore the server must be able to rebuild every client's
        classifier, and all classifiers must have the same structure.
        """
        require_one_architecture(self, settings, "its generator learns from one kind of classifier")
        require_whole_models(self, settings, "its generator learns from the clients' classifiers")
        require_unscaled(self, addons)

    def _head(self, server: AveragingServer) -> Head:
        return Head(server.network(server.settings.networks.names[0]), server.shape)

    def _generator(self, classes: int, embedding: int, draw: torch.Generator | None = None) -> LatentGenerator:
        made = partial(LatentGenerator, classes, self.noise, self.hidden, embedding)
        return cast("LatentGenerator", build(made, draw or torch.Generator()))

    def start(self, server: AveragingServer) -> None:
        """Draw the initial weights of the generator of embeddings, and record that it is not yet trained."""
        classes, embedding = server.task.num_classes, self._head(server).embedding
        drawn = self._generator(classes, embedding, server.generator("FedGen init")).to(server.dtype)
        server.state[self.generator] = copied(drawn)
        server.state[self.seen] = torch.zeros(classes)
        server.state[self.optimizer] = {}

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the generator of embeddings and the classes for which it was trained, if it was trained at all."""
        if server.state[self.seen].any():
            message[self.generator], message[self.seen] = server.state[self.generator], server.state[self.seen]

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add an entry for the client's count of each class to the schema of the reply.

        A count is one plus the number of images of the class in all batches of the client's training. An image that is
        used several times is counted each time.
        """
        settings = server.settings
        read = sum(
            p.epochs * settings.max_samples if p.steps is None else p.steps * settings.batch for p in settings.phases
        )
        schema[self.counts.key] = EntrySpec(torch.zeros(1, server.task.num_classes), minimum=0.0, maximum=1 + read)

    def before_training(self, local: Local) -> None:
        """Start the client's counts of images per class at one, and load the received generator of embeddings.

        `after_step` adds the images of each batch to the counts. In the first round, no generator is received.
        """
        local.scratch(self)["counts"] = torch.ones_like(local.counts, dtype=torch.float32)
        if self.generator in local.message:
            weights = local.message[self.generator]
            net = self._generator(local.task.num_classes, len(weights["out.bias"])).to(weights["out.bias"])
            net.load_state_dict(weights)
            seen = local.message[self.seen].cpu()
            local.scratch(self).update(net=net.eval(), draws=local.generator(self), seen=seen)

    def loss(self, step: Step) -> Tensor | None:
        """Return the weighted sum of two terms on generated embeddings, or None if no generator was received.

        The first is the cross-entropy of the classifier on embeddings of random classes; the second the KL divergence
        between the predictions for an image and for a generated embedding of its class.
        """
        local, labels = step.local, step.batch.labels
        scratch, factor = local.scratch(self), self.decay ** (local.round - 1)
        if "net" not in scratch:
            return None
        if scratch.get("step") is not step:
            draws = scratch["draws"]
            like = local.message[self.generator]["out.bias"]
            noise = torch.randn(2, len(labels), self.noise, generator=draws).to(like, non_blocking=True)
            drawn = torch.multinomial(scratch["seen"], len(labels), replacement=True, generator=draws)
            drawn = drawn.to(labels.device, non_blocking=True)
            with torch.no_grad():
                scratch |= {"step": step, "drawn": drawn, "z": scratch["net"](drawn, noise[0]),
                            "twin": scratch["net"](labels, noise[1])}  # fmt: skip
        classifier = local.network.classifier
        agreed = F.cross_entropy(classifier(scratch["z"]), scratch["drawn"])
        known = local.message[self.seen][labels]
        distance = knowledge_distillation(step.output().logits, classifier(scratch["twin"]).detach(), reduction="none")
        return factor * (self.alpha * agreed + self.beta * (known * distance).mean())

    def after_step(self, step: Step) -> None:
        """Add the number of images of each class in the step's batch to the client's counts of images per class."""
        counts, labels = step.local.scratch(self)["counts"], step.batch.labels
        counts.index_add_(0, labels, torch.ones_like(labels, dtype=counts.dtype))

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Send the client's count of the images of each class."""
        reply[self.counts] = local.scratch(self)["counts"][None]

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Write the weights of the client's trained classifier to `out`: the global weights plus the client's update.

        The server's generator learns from the classifiers of all clients.
        """
        if FedAvg.update not in reply:
            return
        name = server.settings.networks.names[0]
        old, update = server.weights(name), server.weights(name, of=reply[FedAvg.update])
        out[self.head] = {n: (old[n] + update[n])[None] for n in self._head(server).names}

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Train the generator of embeddings with the classifiers of this round's clients.

        The column "generator_loss" of the history shows the loss of the generator.
        """
        if self.head not in replies:
            return
        counts = replies[self.counts]
        shares, owned = counts / counts.sum(0).clamp_min(1), (counts.amax(0) > 1).float()
        if not owned.any():
            return
        state, head, heads = server.state, self._head(server), replies[self.head]
        weights: Tensors = state[self.generator]
        net = self._generator(server.task.num_classes, head.embedding).to(weights["out.bias"]).train()
        net.load_state_dict(weights)
        rate = self.lr * self.decay ** (server.round - 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=rate, weight_decay=self.weight_decay, foreach=False)
        names = [n for n, _ in net.named_parameters()]
        load_state(optimizer, names, state[self.optimizer])
        draws, classes = server.generator("FedGen"), owned.cpu()
        for _ in range(self.steps):
            server.check_running()
            y = torch.multinomial(classes, self.batch, replacement=True, generator=draws)
            y = y.to(owned.device, non_blocking=True)
            noise = torch.randn(self.batch, self.noise, generator=draws).to(weights["out.bias"], non_blocking=True)
            z = net(y, noise)
            loss = self.diversity_weight * diversity(noise, z)
            for k, share in enumerate(shares):
                logits = head.at({n: t[k] for n, t in heads.items()}, z)
                loss = loss + (share[y] * F.cross_entropy(logits, y, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state[self.generator] = copied(net)
        state[self.optimizer], state[self.seen] = saved_state(optimizer, names), torch.maximum(state[self.seen], owned)
        server.notes["generator_loss"] = float(loss.detach())
