"""FedDM with differential privacy: clients send synthetic sets that they make from noised statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit import privacy
from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.networks import NetworkBall
from distillkit.privacy import PrivacyError, PublicEmbedders
from distillkit.privacy.accounting._ranges import check_clip, check_sigma
from distillkit.privacy.validation._arguments import (
    initial_images,
    open_private_set,
    refuse_large_delta,
    refuse_measured_normalization,
)
from distillkit.privacy.validation._private_records import apart_from_records
from distillkit.sets import LabeledImages
from fl._noise_images import empty_set
from fl.aggregation import AggregatedReplies, Schema
from fl.message import Entry
from fl.method import NoUsableReply
from fl.methods.feddm import FedDM
from fl.participants import Client, Server


class PrivateFedDM(FedDM):
    """FedDM whose clients' sets are differentially private for each record (Xiong et al., CVPR 2023, section 3.3).

    A record is an image with its label. There are two mechanisms. With "class_means", a client embeds its records with
    `num_networks` public networks, which are drawn at random around the received weights. For each class, it sums the
    embeddings of its records and adds noise to the sums. It then fits images to the noised means, which costs no
    further privacy. "image_sgd" is the paper's mechanism: DP-SGD on the images.

    Every client takes part, even one without records. The privacy cost is charged to the run's ledger before noise is
    drawn. Epsilon is composed over rounds; the run's epsilon is the largest epsilon of any client.

    The following deviations from the paper are needed for its privacy claim to hold. Statistics of all classes are
    computed with noise, because the paper's sets reveal which client has a class. The numbers of records by which sums
    are divided are public, or are noised once. Epsilon comes from an accountant for the whole run, whereas the paper's
    Theorem 3.2 covers one round. See also `distillkit.privacy.image_sgd`. Images of classes with a noised number of
    records below `least` are not sent; otherwise the server would train on noise for every class that a client lacks.

    Args:
        sigma: noise multiplier of a release, that is, the noise's standard deviation divided by the sensitivity. A
            round has `num_networks` releases with "class_means", and `steps` with "image_sgd". To compute sigma, use
            `privacy.plan_noise(epsilon, delta, count=num_networks * rounds, spent=[(sigma_sizes, 1.0, 1)])`; for
            "image_sgd", use `rate=rate` and `count=steps * rounds`.
        mechanism: privacy mechanism, "class_means" or "image_sgd".
        num_networks: number of networks in a round (only for "class_means").
        sizes: number of records per class, [classes], that is assumed for every client. It must not depend on private
            data. Pass either this or `sigma_sizes`.
        sigma_sizes: standard deviation, in records, of the noise on a client's numbers of records per class. Each
            client computes these noised numbers once, in its first round. If its reply is lost, it computes them again,
            and is charged again.
        least: minimum noised number of records of a class for which images are sent; with 0, images of all classes are
            sent. Default: 3 `sigma_sizes`, or 0 if `sizes` is given.
        warm: whether a client's fit starts from the images that it sent last, instead of noise. The center that is
            subtracted from each embedding (see `clip`) is then the mean embedding of these images. Subtracting this
            center separates the classes better.
        clip: largest norm of a record's embedding ("class_means") or gradient ("image_sgd"). None with "class_means":
            the mean embedding of noise images, the center, is subtracted from each embedding, and the difference is
            scaled to norm 1. None with "image_sgd": gradients are clipped to the median gradient norm of noise images.
        rate: probability with which a record takes part in a step (only for "image_sgd").
        steps, lr, momentum: options of the optimization of the images. The default of `lr` is 200 for "class_means",
            and 0.1 for "image_sgd".
        public_statistics: whether the normalization of the images comes from public data. If False, a normalization
            that was measured on the images is refused.
        weights: weights of the images in the server's loss. "synthetic": all images have the same weight. "samples":
            the weight is proportional to the noised number of records of the image's class at the client that sent the
            image.
        options: other options of `FedDM`: `factory`, `ipc`, `rho`, `match`, `augment`, and the options of the server's
            training, such as `server_lr`.

    Raises:
        PrivacyError: the option `init` of `FedDM` is given and is not "noise", the network normalizes with batch
            statistics, the normalization was measured on private data, or `clip` is infinite.
        ValueError, TypeError: an option has a wrong type or is out of range.
    """

    counts = Entry[Tensor]("first")
    last = Entry[Tensor]("first")

    def __init__(
        self,
        *,
        sigma: float,
        mechanism: Literal["class_means", "image_sgd"] = "class_means",
        num_networks: int = 10,
        sizes: Sequence[float] | None = None,
        sigma_sizes: float | None = None,
        least: float | None = None,
        warm: bool = False,
        clip: float | None = None,
        rate: float = 0.05,
        steps: int = 300,
        lr: float | None = None,
        public_statistics: bool = False,
        **options: Any,
    ) -> None:
        if options.pop("init", "noise") != "noise":
            raise privacy.PrivateInitialization(
                "a private set must start from noise, because the release would contain real images: leave init out"
            )
        if "batch_real" in options:
            raise ValueError(
                "batch_real is not an option here: all records take part, or each with probability `rate`; leave it out"
            )
        self.mechanism = check.one_of(mechanism, "mechanism", ("class_means", "image_sgd"))
        lr = (200.0 if mechanism == "class_means" else 0.1) if lr is None else lr
        super().__init__(init="noise", steps=steps, lr=lr, **options)
        self.sigma = check_sigma(sigma)
        if self.sigma == 0:
            name = type(self).__name__
            warn(f"{name}(sigma=0) adds no noise: nothing is guaranteed, and the history's epsilon is None")
        self.num_networks = check.positive_int(num_networks, "num_networks")
        if (sizes is None) == (sigma_sizes is None):
            raise PrivacyError(
                "give either sizes (public numbers) or sigma_sizes (the noise of a histogram that is released once), "
                f"because the true class sizes are private; got {'neither' if sizes is None else 'both'}"
            )
        given = () if sizes is None else check.sequence(sizes, "sizes", "numbers, one a class")
        self.sizes = None if sizes is None else [check.real_number(n, "sizes", above=0.0) for n in given]
        self.sigma_sizes = 0.0 if sigma_sizes is None else check_sigma(sigma_sizes, "sigma_sizes")
        self.least = None if least is None else check.real_number(least, "least", least=0.0)
        self.warm = check.boolean(warm, "warm")
        self.public_statistics = check.boolean(public_statistics, "public_statistics")
        self.clip = clip
        if clip is not None and not (isinstance(clip, float) and clip == math.inf):
            self.clip = check_clip(clip)
        if self.clip == math.inf and self.sigma:
            raise PrivacyError("clip must be finite, got infinity: without a clip no noise is large enough")
        self.rate = check.real_number(rate, "rate", above=0.0, most=1.0)

    @property
    def private(self) -> bool:
        """Always True, because clients charge a ledger for every release."""
        return True

    @property
    def clip_bound(self) -> float | None:
        """Bound on the norm of a record's part of a noised sum; None if it depends on the received weights."""
        return 1.0 if self.clip is None and self.mechanism == "class_means" else self.clip

    def start(self, server: Server) -> None:
        """Draw the initial weights, and refuse settings that would reveal private data.

        Raises:
            PrivacyError: the normalization was measured on the clients' images, the ledger's delta is too large for the
                number of records, or the network normalizes with batch statistics.
            ValueError: the task has several classes per image, or the option `sizes` (numbers of records per class)
                does not have one number per class.
        """
        super().start(server)
        classes = server.task.num_classes
        if self.sizes is not None and len(self.sizes) != classes:
            raise ValueError(f"sizes must be {classes} numbers, one a class, got {len(self.sizes)}")
        if not self.public_statistics:
            refuse_measured_normalization(server.normalization, type(self).__name__)
        if server.ledger is not None:
            server.ledger.assume(
                next(k for k in (getattr(c, "key", "") for c in type(self).__mro__) if k in privacy.ASSUMPTIONS)
            )
        if server.ledger is not None and self.sizes is not None:
            refuse_large_delta(sum(self.sizes), server.ledger.delta)
        net = self.networks.on(server, server.state[self.model])
        self.embedders(net.eval(), empty_set(server), torch.Generator())

    def embedders(
        self, network: nn.Module, like: LabeledImages, generator: torch.Generator, centers: Tensor | None = None
    ) -> PublicEmbedders:
        """Return the networks with which records are embedded in a round.

        The networks are drawn at random around the received weights. The mean embedding of released images or of noise
        images is subtracted from each embedding. Both steps use only public or released data.

        Args:
            network: network with the received weights, in eval mode.
            like: set with the shape, dtype and normalization of the records. Its images are not read.
            generator: generator that draws the networks.
            centers: released images whose mean embedding is subtracted. None: noise images are used.
        """
        seed = int(torch.randint(2**62, (), generator=generator))
        options: dict[str, Any] = {"clip": self.clip, "match": self.match, "augment": self.augment}
        if centers is not None and len(centers):
            options["centers"] = centers
        return PublicEmbedders(NetworkBall(network, self.rho), self.num_networks, like=like, seed=seed, **options)

    def charged(self, client: Client) -> tuple[LabeledImages, privacy.Account]:
        """Check the metadata of a client's records. Return the records and the account that is charged for releases.

        Raises:
            PrivacyError: the client has no ledger, or the metadata of its set, such as a measured normalization, reveal
                private data.
        """
        if client.ledger is None:
            raise PrivacyError("the client has no ledger to charge: run the method with `simulate`, which gives it one")
        options: dict[str, Any] = {"delta": client.ledger.delta, "public_statistics": self.public_statistics}
        account = privacy.Account(client.ledger, client=client.id, round=client.round, secret=client.secret)
        records = open_private_set(client.data, None, **options)
        assert isinstance(records, LabeledImages)
        return records, account

    def sizes_of(self, client: Client) -> Tensor:
        """Return the number of records of each class at a client, float64 [classes].

        These are the numbers in the option `sizes` or, without this option, noised numbers. The noised numbers are
        computed once, charged to the ledger, and then kept in the memory of `client`.
        """
        if self.sizes is not None:
            return client.data.images.new_tensor(self.sizes, dtype=torch.float64)
        if self.counts not in client.memory:
            real, account = self.charged(client)
            client.memory[self.counts] = privacy.private_histogram(
                real.labels, num_classes=real.num_classes, sigma=self.sigma_sizes, ledger=account
            )
        return client.memory[self.counts]

    @apart_from_records(content=False)
    def synthesize(self, client: Client, network: nn.Module) -> LabeledImages:
        """Return a set that is made from noised statistics only. The client's ledger is charged before each release."""
        real, account = self.charged(client)
        counts = self.sizes_of(client)
        chosen = self.kept(counts).repeat_interleave(self.ipc)
        last = client.memory.get(self.last)
        start = last if last is not None else self.noise_images(real, client.generator("start"))
        start = start.to(real.images)
        if self.mechanism == "class_means":
            embedders = self.embedders(network, real, client.generator("maps"), None if last is None else start[chosen])
            sums = privacy.class_sums(real.images, real.labels, embedders, num_classes=real.num_classes)
            noised = privacy.release(sums, sigma=self.sigma, sensitivity=embedders.sensitivity, ledger=account)
            images = self.fit(start, embedders, noised, counts, self.kept(counts))
        else:
            ball = privacy.EmbeddingNetworks(NetworkBall(network, self.rho), match=self.match, augment=self.augment)
            public = replace(real.normalization, measured=False)  # `charged` has checked it
            images = privacy.image_sgd(
                real.replace(normalization=public), size=max(1, round(float(counts.sum()))), sigma=self.sigma,
                delta=account.ledger.delta, ipc=self.ipc, networks=ball, clip=self.clip, rate=self.rate,
                steps=self.steps, lr=self.lr, momentum=self.momentum, init=self.as_set(start, real), ledger=account,
                generator=client.generator("images"), callback=lambda *_: client.check_running(),
            ).images  # fmt: skip
        if self.warm:
            client.memory[self.last] = images
        return self.as_set(images, real)[chosen]

    def noise_images(self, like: LabeledImages, generator: torch.Generator) -> Tensor:
        """Return `ipc` images of N(0, 1) for every class, in the order of the classes.

        Args:
            like: set with the shape, dtype and normalization of the images.
            generator: generator that draws the images.
        """
        return initial_images("noise", like, ipc=self.ipc, generator=generator)[0]

    def kept(self, counts: Tensor, clients: int = 1) -> Tensor:
        """Return whether a class has the minimum number of records, `least`, for which images are sent, bool [classes].

        Args:
            counts: noised or public number of records of each class, [classes].
            clients: number of clients whose noised numbers were summed. The default of `least` grows with its square
                root.
        """
        least = 3 * self.sigma_sizes * clients**0.5 if self.least is None else self.least
        return counts.clamp_min(0.0) >= least

    def fit(self, start: Tensor, embedders: PublicEmbedders, sums: Tensor, counts: Tensor, kept: Tensor) -> Tensor:
        """Fit images so that their mean embeddings match noised class means. This post-processing has no privacy cost.

        Args:
            start: initial images, `ipc` of each class in the order of the classes, [classes * ipc, C, H, W].
            embedders: networks of the round, as the method `embedders` returns them.
            sums: noised sums of the embeddings, [num_networks, classes, d].
            counts: public or noised number of records of each class, [classes].
            kept: whether each class is sent, bool [classes]. Images of other classes are returned unchanged.
        """
        images = start.unflatten(0, (len(counts), self.ipc)).clone()
        if bool(kept.any()):
            targets = (sums / counts.clamp_min(1.0).view(1, -1, 1))[:, kept]
            fitted = privacy.fit_to_means(
                images[kept].flatten(0, 1), embedders, targets, steps=self.steps, lr=self.lr, momentum=self.momentum
            )
            images[kept] = fitted.unflatten(0, (-1, self.ipc))
        return images.flatten(0, 1)

    def as_set(self, images: Tensor, like: LabeledImages) -> LabeledImages:
        """Return a set of images in the order of the classes, with their labels.

        Args:
            images: images of the set, [classes * ipc, C, H, W].
            like: set with the classes and the normalization of the images.
        """
        labels = torch.arange(like.num_classes).to(like.labels).repeat_interleave(self.ipc)
        return like.replace(images=images, labels=labels, columns={}, info={})

    def weight_of(self, client: Client, synthetic: LabeledImages) -> Tensor:
        """Return the noised number of records of each sent image's class, divided by `ipc`, float [N]."""
        return (self.sizes_of(client)[synthetic.labels] / self.ipc).clamp(0.0, self.max_samples).float()

    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a reply: that of `FedDM` and, with `weights="samples"`, a weight for each image.

        Pixels may be as large as 1e9, because noise may make them far larger than in `FedDM`.
        """
        schema, rows = super().expect(server, client), self.ipc * server.task.num_classes
        schema[self.images.key] = replace(schema[self.images.key], minimum=-1e9, maximum=1e9)
        if self.weights == "samples":
            schema[self.samples.key] = replace(schema[self.samples.key], max_rows=rows, same_rows_as=self.images)
        return schema

    def train(self, server: Server, union: LabeledImages, weight: Tensor) -> None:
        """Train the server's weights on the union of the sets that the clients sent, as `FedDM.train` does.

        Raises:
            NoUsableReply: no client sent an image. This error ends the run.
        """
        if not len(union):
            raise NoUsableReply(
                "no class of any client has enough noised records to be sent (`least`): the clients are too small "
                "for this noise; give less noise, larger clients or a smaller `least`"
            )
        super().train(server, union, weight)

    def weigh(self, replies: AggregatedReplies) -> Tensor:
        """Return the weight of each image in the server's loss, float [N] with mean 1, for the N images that the
        clients sent.

        All weights are equal with `weights="synthetic"`. With `weights="samples"`, they are proportional to the image
        weights in the replies.
        """
        if self.weights == "synthetic":
            return super().weigh(replies)
        weight = replies[self.samples]
        return weight / weight.mean().clamp_min(1e-12)
