"""FedDM whose clients send noised class sums, to which the server fits one set for all clients."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy import PublicEmbedders, class_sums
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.message import Entry, Message
from fl.method import NoUsableReply
from fl.methods.private_feddm import PrivateFedDM
from fl.participants import Client, Server

__all__ = ["SummedFedDM"]

REMARK = (
    "clients share one noise: epsilon holds against those who see nothing but the sum over all drawn clients (a secure "
    "sum), if no client reveals its part of the noise"
)


class SummedFedDM(PrivateFedDM):
    """Private FedDM with one sum over clients (after Xiong et al., CVPR 2023, section 3.3).

    Clients do not optimize images. In each round all clients embed their records with the *same* public embedders
    around the received weights, and send noised class sums. The server needs only the total of these sums, so a secure
    sum can hide each client's sums. The server fits `ipc` images per class to the noised means of all clients' records,
    and trains on them as FedDM does.

    With `noise="full"`, every client adds all of the noise, and epsilon holds even against the server. With
    `noise="shares"`, each of M drawn clients adds noise of sigma / sqrt(M), so the sum equals a central release on the
    pooled records. Epsilon then requires a secure sum (`fl.SecureSums`) and all replies: a round that lacks a reply is
    unusable. A remark in the ledger states this.

    Args:
        sigma: noise standard deviation / sensitivity of each client's own sums ("full"), or of the total ("shares").
        noise: share of the noise that each client adds, "full" or "shares"; see above.
        sizes: public number of records per class over all drawn clients. Give this or `sigma_sizes`.
        sigma_sizes: noise on the histogram of class sizes. With "full" it applies to each client's histogram, which is
            released once. With "shares" it applies to the total, which is released in *every* round, because a share
            used again in a sum with other clients would be exposed. Plan the noise with `spent=[(sigma_sizes, 1.0,
            rounds)]`.
        options: options of `PrivateFedDM` except `mechanism`.

    Raises:
        NoUsableReply: a reply is missing with `noise="shares"`.
        PrivacyError, ValueError, TypeError: see `PrivateFedDM`.
    """

    key = "SummedFedDM"
    among = Entry[float]("first")
    around = Entry[Tensor]("first")
    sums = Entry[Tensor]("sum")
    total = Entry[Tensor]("sum")

    def __init__(self, *, noise: Literal["full", "shares"] = "full", **options: Any) -> None:
        if options.get("mechanism", "class_means") != "class_means":
            raise ValueError(f"mechanism={options['mechanism']!r} cannot be summed, only class means can: leave it out")
        super().__init__(**options)
        self.noise = check.one_of(noise, "noise", ("full", "shares"))

    def start(self, server: Server) -> None:
        """Draw w_0, determine the length of a sum, and add a remark on the basis of epsilon to the ledger."""
        super().start(server)
        dim = self.shared_embedders(server, server.state, self.blank(server)).dim
        server.state[self.sums] = torch.zeros(self.num_networks, server.task.num_classes, dim, dtype=torch.float64)
        if self.noise == "shares" and server.ledger is not None:
            server.ledger.add_remark(REMARK)

    def shared_embedders(self, side: Server | Client, holds: Message, like: LabeledImages) -> PublicEmbedders:
        """Return this round's embedders, which depend only on seed, round and message, for all participants alike.

        Args:
            side: server or client that makes the embedders.
            holds: the server's state or the client's message, with the weights and the images to center on.
            like: set that defines the space of the images; the images in this set are not read.
        """
        net = self.networks.on(side, holds[self.model])
        return self.embedders(net.eval(), like, derive(side.seed, side.round, "maps"), holds.get(self.around))

    def send(self, server: Server, client: int) -> Message:
        """Send the current weights, the number of clients that share the noise, and the images to center on."""
        among = float(len(server.drawn)) if self.noise == "shares" else 1.0
        message = Message({self.model: server.state[self.model], self.among: among})
        if self.around in server.state:
            message[self.around] = server.state[self.around]
        return message

    def local(self, client: Client, message: Message) -> Message:
        """Send noised sums of the records' vectors by embedder and class, and noised class sizes if not public."""
        real, _ = self.charged(client)
        embedders = self.shared_embedders(client, message, real)
        sums = class_sums(real.images, real.labels, embedders, num_classes=real.num_classes)
        share = message[self.among] ** -0.5
        reply = Message({self.sums: self.noised(client, "class_means", sums, self.sigma, embedders.sensitivity, share)})
        if self.sizes is None:
            counts = client.memory.get(self.counts)
            if counts is None:
                own = real.counts()[None].double()
                counts = self.noised(client, "histogram", own, self.sigma_sizes, 1.0, share)[0]
                if self.noise == "full":
                    client.memory[self.counts] = counts
            reply[self.total] = counts
        return reply

    @staticmethod
    def noised(client: Client, mechanism: str, sums: Tensor, sigma: float, sensitivity: float, share: float) -> Tensor:
        """Add this client's share of the noise to its sums, and charge the ledger for the total noise.

        Args:
            client: client that draws the noise and is charged.
            mechanism: name of the release in the ledger.
            sums: one release per row, [releases, ...].
            sigma: noise standard deviation / sensitivity of the total.
            sensitivity: maximum l2 norm by which one record changes a row.
            share: factor of this client's standard deviation: 1, or 1 / sqrt(M).
        """
        client.spend(mechanism, sigma, count=len(sums))
        noise = client.secret.normal(sums.shape, sigma * sensitivity * share if sigma else 0.0)
        return sums + noise.to(sums.device)

    def expect(self, server: Server, client: int) -> Schema:
        """Expect sums for every embedder and class, and the class sizes if they are not public."""
        sums = server.state[self.sums]
        schema: Schema = {self.sums.key: EntrySpec(sums)}
        if self.sizes is None:
            schema[self.total.key] = EntrySpec(sums[0, :, 0])
        return schema

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Fit one set to the noised means of all clients' records, and train on this set.

        Raises:
            NoUsableReply: a reply, with its share of the noise, is missing, or there is no image to train on.
        """
        missing = sorted(set(server.drawn) - set(replies.clients))
        if missing and self.noise == "shares":
            raise NoUsableReply(
                f"the noise lacks the shares of clients {missing}, so the sum of this round is not usable"
            )
        like = self.blank(server)
        sums = server.state[self.sums] = replies[self.sums]
        counts = replies[self.total] if self.sizes is None else sums.new_tensor(self.sizes, dtype=torch.float64)
        kept = self.kept(counts, len(server.drawn) if self.noise == "full" else 1)
        last = server.state.get(self.last)
        start = last if last is not None else self.noise_images(like, server.generator("start"))
        images = self.fit(start, self.shared_embedders(server, server.state, like), sums, counts, kept)
        union = self.as_set(images, like)[kept.repeat_interleave(self.ipc)]
        if self.warm:
            server.state[self.last], server.state[self.around] = images, union.images
        alike = union.labels.new_ones(len(union), dtype=torch.float32)
        weight = alike if self.weights == "synthetic" else counts.clamp_min(0.0)[union.labels].float()
        self.train(server, union, weight / weight.mean().clamp_min(1e-12) if len(weight) else weight)
