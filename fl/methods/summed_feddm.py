"""FedDM with differential privacy: clients send noised sums of embeddings, and the server fits images to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy import PrivacyError, PublicEmbedders, class_sums
from distillkit.privacy.validation._private_records import apart_from_records
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl._noise_images import empty_set
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.message import Entry, Message
from fl.method import NoUsableReply
from fl.methods.private_feddm import PrivateFedDM
from fl.participants import Client, Server

REMARK = (
    "clients share one noise: epsilon holds against those who see nothing but the sum over all drawn clients (a secure "
    "sum), if no client reveals its part of the noise"
)


class SummedFedDM(PrivateFedDM):
    """Private FedDM in which the server needs only sums over clients (after Xiong et al., CVPR 2023, section 3.3).

    Clients do not optimize images. In each round, all clients embed their records with the same networks, whose weights
    are drawn at random around the received weights. For each class, they send the sum of the embeddings with noise. The
    server needs only the total over all clients, so a secure sum can hide each client's sums. The server fits `ipc`
    images per class to the noised means over all clients' records, and trains on these images as FedDM does.

    With `noise="full"`, every client adds the whole noise, and epsilon holds even against the server. With
    `noise="shares"`, each of M drawn clients adds noise with the standard deviation divided by sqrt(M), so the total
    has the noise that a single trusted party would add to the pooled records. Epsilon then holds only with a secure sum
    (`fl.SecureSums`), which a remark in the ledger states, and only if all replies arrive. With "shares", a round in
    which a reply is missing cannot be used. A sum of rounded shares is as private as the rounded Gaussian up to a
    factor of 1 + exp(-2 pi^2 r^2), where r is a share's standard deviation divided by the unit of the grid. Without a
    secure sum, r is at least 2^20; a secure sum with r below 16 is refused at the start of the run.

    Args:
        sigma: noise multiplier (standard deviation divided by sensitivity) of each client's own sums ("full"), or of
            the total ("shares").
        noise: noise that each client adds, "full" or "shares".
        sizes: number of records per class, [classes], that is assumed for all drawn clients together. It must not
            depend on private data. Pass either this or `sigma_sizes`.
        sigma_sizes: standard deviation, in records, of the noise on the numbers of records per class. With "full", it
            applies to each client's numbers, which are released once. With "shares", it applies to the total, which is
            released with new noise in every round. If the same noise were used twice, it would cancel in the difference
            of two totals, and reveal exact numbers. For "shares", pass `spent=[(sigma_sizes, 1.0, rounds)]` to
            `privacy.plan_noise`: noise multiplier, sample rate (all records take part) and number of releases.
        options: other options of `PrivateFedDM`, except `mechanism`.

    Raises:
        NoUsableReply: a reply is missing with `noise="shares"`.
        PrivacyError, ValueError, TypeError: an option is not valid or would reveal private data, as in `PrivateFedDM`.
    """

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
        """Draw the initial weights, and determine the shape of the sums of embeddings that clients send.

        With `noise="shares"`, epsilon holds only with a secure sum. A remark in the privacy ledger states this.

        Raises:
            PrivacyError: `noise="shares"` with `Ledger(disjoint=False)`. A record at k clients adds k times to a sum
                that has the noise for one.
        """
        if self.noise == "shares" and server.ledger is not None and not server.ledger.disjoint:
            raise PrivacyError(
                "noise='shares' adds the noise for one contribution of a record, but with Ledger(disjoint=False) "
                "several clients may contribute the same record; use noise='full', or a ledger with disjoint=True if "
                "no two clients have the same record"
            )
        super().start(server)
        dim = self.shared_embedders(server, server.state, empty_set(server)).dim
        server.state[self.sums] = torch.zeros(self.num_networks, server.task.num_classes, dim, dtype=torch.float64)
        if self.noise == "shares" and server.ledger is not None:
            server.ledger.add_remark(REMARK)

    def shared_embedders(self, side: Server | Client, entries: Message, like: LabeledImages) -> PublicEmbedders:
        """Return the networks with which records are embedded in a round.

        The networks are the same on the server and on all clients.

        Args:
            side: server or client that builds the networks.
            entries: the server's state if `side` is the server, otherwise the message that the client received. It
                contains the network weights and, in some rounds, images. The mean embedding of these images is
                subtracted from all embeddings.
            like: set with the shape, dtype and normalization of the records. Its images are not read.
        """
        net = self.networks.on(side, entries[self.model])
        return self.embedders(net.eval(), like, derive(side.seed, side.round, "maps"), entries.get(self.around))

    def send(self, server: Server, client: int) -> Message:
        """Return a message with the weights, the number of clients that share the noise (1 with `noise="full"`), and,
        with
        `warm`, the images of the last fit, whose mean embedding is subtracted.
        """
        among = float(len(server.drawn)) if self.noise == "shares" else 1.0
        message = Message({self.model: server.state[self.model], self.among: among})
        if self.around in server.state:
            message[self.around] = server.state[self.around]
        return message

    @apart_from_records(content=False)
    def local(self, client: Client, message: Message) -> Message:
        """Reply with noised sums of the records' embeddings: one sum for each embedding network and class.

        If the option `sizes` is None, the reply also has the noised number of records of each class.
        """
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
        """Charge a client's releases to the ledger, then add the client's share of the noise to its sums.

        Args:
            client: client that draws the noise and is charged.
            mechanism: name of the mechanism in the ledger.
            sums: values to release, [releases, ...]. Each row is one release.
            sigma: noise multiplier of the whole noise, for which is charged.
            sensitivity: maximum l2 norm by which one record changes a row.
            share: factor of this client's standard deviation: 1, or 1 / sqrt(M) if M clients share the noise.
        """
        client.spend(mechanism, sigma, count=len(sums))
        return client.secret.add_noise(sums, sigma * sensitivity * share if sigma else 0.0)

    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a reply: noised sums of the embeddings, for each network and class.

        If the option `sizes` is None, the reply also has the noised number of records of each class. With
        `noise="shares"`, no filter may round these values to a grid that is coarse compared with a client's noise.
        """
        sums = server.state[self.sums]
        schema: Schema = {self.sums.key: EntrySpec(sums, max_unit=self._max_unit(server, self.sigma, self.clip_bound))}
        if self.sizes is None:
            schema[self.total.key] = EntrySpec(sums[0, :, 0], max_unit=self._max_unit(server, self.sigma_sizes, 1.0))
        return schema

    def _max_unit(self, server: Server, sigma: float, sensitivity: float | None) -> float:
        """Return the largest unit to which a reply may be rounded: 1/16 of a client's share of the noise."""
        if not sigma or sensitivity is None or self.noise == "full":
            return math.inf
        return sigma * sensitivity / math.sqrt(server.clients) / 16

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Refuse a round that lacks a reply before a secure sum with a part of the noise is opened; see `receive`."""
        if verb == "local":
            self._require_shares(server, replies)
        return {}

    def _require_shares(self, server: Server, replies: AggregatedReplies) -> None:
        missing = sorted(set(server.drawn) - set(replies.clients))
        if missing and self.noise == "shares":
            raise NoUsableReply(
                f"the noise lacks the shares of clients {missing}, so the sum of this round is not usable"
            )

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Fit one set of images to the noised mean embeddings of all clients' records, and train the server's weights
        on it.

        Raises:
            NoUsableReply: with `noise="shares"`, a reply is missing, so that a part of the noise is, too; or there is
                no image to train on.
        """
        self._require_shares(server, replies)
        like = empty_set(server)
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
