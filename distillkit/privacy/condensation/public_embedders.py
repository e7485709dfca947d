"""Public embedders: networks, independent of the private images, that map images to vectors of bounded length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.augment import Augmentation, require_normalization
from distillkit.condense._class_embeddings import MATCHES, embed
from distillkit.networks._base import Network
from distillkit.networks.samplers import NetworkSampler
from distillkit.privacy._public_noise import public_noise, public_test_images
from distillkit.privacy._sealed import Sealed
from distillkit.privacy.accounting._ranges import check_clip
from distillkit.privacy.capture._captured_function import (
    CapturedFunction,
    capture,
    captured_augmentation,
    require_plain,
)
from distillkit.privacy.capture._tracing import MARKER, Stateless, held_beside_state
from distillkit.privacy.errors import BatchStatistics, NotCapturable
from distillkit.privacy.validation._independence import is_own_augmentation, is_own_network, refuse_batch_norm
from distillkit.privacy.validation._private_records import Untouched, active_records
from distillkit.rng import derive
from distillkit.sets import LabeledImages

_MARGIN = 1 - 2.0**-26
"""Factor that keeps rounding errors from lengthening a vector beyond its bound."""

_Captured = dict[str, tuple[list[Any], CapturedFunction]]
"""Captured functions of a network by name, each with the kinds of its arguments."""


class PublicEmbedder(Sealed):
    """Function v(x) that maps private and synthetic images alike to vectors of bounded length.

    Because of the bound, adding noise to a sum of vectors makes the sum private. Let phi(x) be the embedding of x, and
    let `a` be the public center. Then v(x) = (phi(x) - a) / ||phi(x) - a||. With a clip C,
    v(x) = (phi(x) - a) min(1, C / ||phi(x) - a||). Call an embedder with images [N, C, H, W]. `PublicEmbedders` creates
    several embedders, which are used together.

    Pass private images only to `of_private` and `embed_private`, which run no user code on private images. They call
    networks and augmentations of this package, or a graph of operators that was captured from your code for one image
    (see `per_example_gradients`). All other methods are for public or synthetic images.

    Args:
        network: network that computes phi.
        center: public center a, float [F]; None for no center.
        clip: largest length C of a vector, in [1e-12, 1e30], or infinity. With None, every vector is scaled to length
            1.
        match: network output used as phi: `"embedding"`, or `"embedding+logits"` (both, concatenated).
        augment: augmentation, applied to all images with the same random parameters; None for no augmentation.
        state: seed, and index of this embedder in its `PublicEmbedders`. The random parameters of the augmentation are
            derived from both.
    """

    def __init__(
        self,
        network: Network,
        center: Tensor | None,
        *,
        clip: float | None = None,
        match: str = "embedding",
        augment: Augmentation | None = None,
        state: tuple[int, int] = (0, 0),
    ) -> None:
        self.clip = None if clip is None else check_clip(clip, infinite=True)
        self.network, self.center, self.match = network, center, match
        self.augment, self.state = augment, state
        refuse_batch_norm(network)
        self.own = is_own_network(network) and is_own_augmentation(augment)
        function_name = f"the network {type(network).__name__}"
        self._call = Stateless(network if isinstance(network, nn.Module) else nn.Module(), self.plain, function_name)
        self._captured: _Captured = {}
        self._augment_private: Callable[[Tensor, torch.Generator], Tensor] | None = None

    @property
    def sensitivity(self) -> float:
        """Largest l2 norm by which one record changes a sum of embeddings: the option `clip`, or 1 if it is None."""
        return 1.0 if self.clip is None else self.clip

    def embedding(self, images: Tensor) -> Tensor:
        """Compute the embedding phi(x) of each image x, before centering and clipping.

        If the embedder has an augmentation, it is applied first. Its random parameters are the same for all images and
        in every call.

        Args:
            images: images with the normalization of the private set, float [N, C, H, W].

        Returns:
            Embeddings, float [N, F].
        """
        if self.augment is not None:
            images = self.augment(images.clone(), self._generator(), siamese=True)
        return self.plain(images)

    def _generator(self) -> torch.Generator:
        return derive(self.state[0], "augment", self.state[1])

    def plain(self, images: Tensor) -> Tensor:
        """Compute the embedding phi(x) of each image x, before centering and clipping.

        The embedder's augmentation is not applied.

        Args:
            images: images with the normalization of the private set, float [N, C, H, W].

        Returns:
            Embeddings, float [N, F].
        """
        return embed(self.network, images.clone(), self.match)  # a layer may work in place

    def prepare(self, like: Tensor, *, gradients: bool = False) -> None:
        """Embed one gray image as a private image, so that an unsuitable network is refused before it gets records.

        All user-defined code is captured here. So how often it runs does not depend on the records.

        Args:
            like: images [N, C, H, W] with the shape, dtype and device of the records; N may be 0.
            gradients: whether to capture the result of `pull_back` for these images, too.

        Raises:
            BatchStatistics, NotCapturable: the network or the augmentation is not a fixed function of one image.
        """
        row = self.embed_private(like.new_zeros(1, *like.shape[1:]))
        if gradients and not self.own and "gradient" not in self._captured:
            self.pull_back(torch.zeros_like(like), batched=False)(row)

    @torch.no_grad()
    def embed_private(self, images: Tensor) -> Tensor:
        """Compute the embedding phi(x) of each private image x without running user code on the images.

        The embedder's augmentation, if it has one, is applied first.

        Args:
            images: images with the normalization of the private set, float [N, C, H, W].

        Returns:
            Embeddings, float [N, F]; zeros for an image on which a tensor operator of the network fails.

        Raises:
            BatchStatistics, NotCapturable: the network or the augmentation is not a fixed function of one image.
        """
        require_plain([images], f"the network {type(self.network).__name__}")
        if self.own:
            return self.embedding(images.clone(memory_format=torch.channels_last))
        if self.augment is not None:
            if self._augment_private is None:
                self._augment_private = captured_augmentation(self.augment, images, siamese=True)
            images = self._augment_private(images, self._generator())
        if is_own_network(self.network):
            return self.plain(images)

        def one(state: list[Tensor], image: Tensor) -> list[Tensor]:
            with torch.no_grad():
                row = self._call.at(state, image[None])
            if row.ndim != 2 or len(row) != 1:
                name = type(self.network).__name__
                raise BatchStatistics(f"the network {name} turns 1 image into shape {list(row.shape)}; return one row")
            return [row[0]]

        return self._capture("embedding", one, self._call.state(), images)(self._call.state(), images)[0]

    def _capture(
        self, key: str, function: Callable[..., list[Tensor]], shared: list[Tensor], example: Tensor
    ) -> CapturedFunction:
        kinds = [(t.shape, t.dtype, t.device) for t in (*shared, example[:0])]
        function_name, modules = f"the network {type(self.network).__name__}", [self._call.network]
        known, captured = self._captured.get(key, (None, None))
        if captured is not None and known == kinds:  # perhaps captured before these records were declared
            captured.refuse_records()
            for code in (self.network, self.augment):
                active_records().refuse_reachable(code, function_name)
            return captured
        captured = capture(
            function, shared, [example], function_name=function_name, names=self._call.names(), modules=modules
        )
        if captured.draws and is_own_augmentation(self.augment):
            raise NotCapturable(f"{function_name} draws random numbers, but must embed all images alike; use eval mode")
        self._captured[key] = kinds, captured
        return captured

    def pull_back(self, images: Tensor, *, batched: bool) -> Callable[[Tensor], Tensor]:
        """Return the vector-Jacobian product of the map from synthetic images to their mean embedding.

        The returned function maps n gradients with respect to the mean embedding, float [n, F], to gradients with
        respect to the images, float [n, ipc, C, H, W]. The gradients may depend on private images.

        Args:
            images: synthetic images, float [ipc, C, H, W].
            batched: whether to compute the n products together. The option has no effect on user-defined networks and
                augmentations, whose products are computed by a graph that is traced from their code.
        """
        leaf = images.detach().requires_grad_()
        outer = leaf
        with torch.enable_grad():
            if self.own:
                outer = self.embedding(leaf).mean(0)
            elif self.augment is not None and is_own_augmentation(self.augment):
                outer = self.augment(leaf, self._generator(), siamese=True)

        def through(rows: Tensor) -> Tensor:
            if outer is leaf:
                return rows
            if not len(rows):
                return rows.new_zeros(0, *leaf.shape)
            if batched:
                return torch.autograd.grad(outer, leaf, rows, retain_graph=True, is_grads_batched=True)[0]
            return torch.stack([torch.autograd.grad(outer, leaf, row, retain_graph=True)[0] for row in rows])

        def inner(shared: list[Tensor], cotangent: Tensor) -> list[Tensor]:
            start = shared[-1].detach().requires_grad_()
            with torch.enable_grad():
                seen = start.clone()
                if self.augment is not None and not is_own_augmentation(self.augment):
                    seen = self.augment(seen, MARKER, siamese=True)
                mean = self._call.at(shared[:-1], seen).mean(0)
            return [torch.autograd.grad(mean, start, cotangent)[0]]

        def pull(cotangents: Tensor) -> Tensor:
            if not self.own:
                shared = [*self._call.state(), outer.detach()]
                captured = self._capture("gradient", inner, shared, cotangents)
                cotangents = captured(shared, cotangents, generator=self._generator(), common=True)[0]
            return through(cotangents)

        return pull

    def __call__(self, images: Tensor) -> Tensor:
        """Compute v(x), the centered embedding of bounded length, for each image x.

        Args:
            images: public or synthetic images, float [N, C, H, W].

        Returns:
            Vectors, float [N, F].
        """
        return self.bounded(self.embedding(images))

    def of_private(self, images: Tensor) -> Tensor:
        """Embed private `images` [N, C, H, W] without running user code on them.

        The result is the centered embedding of bounded length, v(x), of each image x, float64 [N, F].
        """
        return self.bounded(self.embed_private(images).double())

    def bounded(self, vectors: Tensor) -> Tensor:
        """Return the embeddings `vectors`, float [N, F], centered and then scaled to a length of at most `clip`.

        If `clip` is None, every centered embedding is scaled to length 1. Lengths are computed in float64, and a result
        in float64 is never longer than `clip` or 1.
        """
        if self.center is not None:
            vectors = vectors - self.center
        if self.clip == math.inf:
            return vectors
        length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=torch.float64)
        factor = 1 / length.clamp_min(1e-12) if self.clip is None else self.clip / length.clamp_min(self.clip)
        return vectors * (factor * _MARGIN).to(vectors.dtype)


class PublicEmbedders(Sealed):
    """Sequence of the public embedders of one release, each with its own network, center and augmentation parameters.

    Each embedder maps an image x to a vector v(x) of bounded length: the embedding of x minus the center, scaled as
    stated under `clip`. Pass the same object to `class_sums` and `fit_to_means`, and its property `sensitivity` to
    `release`. `embedders[k]` depends only on k and the seed. Use an embedder only until you request the next one,
    because a sampler may reuse and overwrite the network of the last embedder.

    Args:
        networks: sampler of the networks, as in `distribution_matching`; it must not depend on the private data, but it
            may depend on results that were released with noise before.
        num_networks: number of networks; each network gives one embedder.
        like: set with the shape, normalization, dtype and device of the images. Its own images are not used.
        clip: largest length of a vector v(x), in [1e-12, 1e30], or infinity; None scales every vector to unit length,
            so that there is no clip to tune.
        match: network output that is matched: `"embedding"`, or `"embedding+logits"` (both, concatenated; FedDM's Eq.
            8).
        augment: augmentation that can be drawn once for all images, such as `DSA()`.
        centers: number of smooth noise images whose mean embedding is the center; 0 for no center. You can also pass
            public images [n, C, H, W], such as a set that was released before. With `clip=None`, the vectors v(x)
            separate the classes better if the center is close to the mean embedding of the private images.
        seed: public seed of networks, noise images and augmentations.

    Attributes:
        dim: number of dimensions F of a vector v(x).

    Raises:
        BatchStatistics: a network or the augmentation mixes the images of a batch.
        TypeError, ValueError: an option has the wrong type or is out of range.
    """

    def __init__(
        self,
        networks: NetworkSampler,
        num_networks: int,
        *,
        like: LabeledImages,
        clip: float | None = None,
        match: str = "embedding",
        augment: Augmentation | None = None,
        centers: int | Tensor = 64,
        seed: int = 0,
    ) -> None:
        self.num_networks = check.positive_int(num_networks, "num_networks")
        self.clip = None if clip is None else check_clip(clip, infinite=True)
        check.one_of(match, "match", MATCHES)
        self._networks, self._match, self._augment, self._seed = networks, match, augment, seed
        self._centers: dict[int, Tensor] = {}
        self._held: list[Any] = []
        self._captured: _Captured = {}
        if isinstance(centers, Tensor):
            check.batch_of_images(centers, "centers")
            self._center_images, self._center_count = centers.detach().to(like.images), len(centers)
        else:
            self._center_count = check.positive_int(centers, "centers", least=0)
            self._center_images = public_noise(max(self._center_count, 4), like, derive(seed, "centre"))
        if augment is not None:
            require_normalization(augment, like.normalization)
        noise = public_test_images(6, like, derive(seed, "try"))
        first = self[0]
        self.dim = first.embed_private(noise).shape[1]
        # Synthetic images are embedded in batches when they are fitted, but private images one by one.
        if not first.own and not _embeds_as_captured(first, noise):
            raise BatchStatistics(
                f"the network {type(first.network).__name__} or its augmentation embeds an image differently "
                "among other images than alone, so private and synthetic images would be embedded differently; treat "
                "every image independently, with one draw of the augmentation for all images"
            )

    @property
    def sensitivity(self) -> float:
        """Largest l2 norm of the vector that a record adds to the sum of its class: `clip`, or 1 if `clip` is None."""
        return 1.0 if self.clip is None else self.clip

    def __len__(self) -> int:
        return self.num_networks

    def __iter__(self) -> Iterator[PublicEmbedder]:
        return (self[k] for k in range(self.num_networks))

    def __getitem__(self, k: int) -> PublicEmbedder:
        records, name = active_records(), f"the sampler {type(self._networks).__name__}"
        with Untouched(records, name, shape=True):
            network = self._networks.draw(derive(self._seed, "network", k))
        records.refuse_reachable(self._networks, name, functions=False)
        records.refuse([("centers", self._center_images)], "the argument")
        if isinstance(network, nn.Module):
            records.refuse_state(network, f"the network {type(network).__name__}")
        if self._center_count and k not in self._centers:
            shown = self._center_images[: self._center_count]
            with torch.no_grad():
                self._centers[k] = self._embedder(network, None, k).embedding(shown).mean(0)
        return self._embedder(network, self._centers.get(k), k)

    def _embedder(self, network: Network, center: Tensor | None, k: int) -> PublicEmbedder:
        """Return an embedder, which keeps the captured functions of the last one that has the same network.

        Its parameters and buffers are arguments of these functions, so their values are always the present ones.
        They are captured again if anything else that the network's modules hold was replaced, or if the network embeds
        public images differently by now, for instance because of a variable outside its modules.
        """
        embedder = PublicEmbedder(
            network, center, clip=self.clip, match=self._match, augment=self._augment, state=(self._seed, k)
        )
        held = [network, *held_beside_state(network)] if isinstance(network, nn.Module) else [network]
        if len(held) != len(self._held) or any(one is not other for one, other in zip(held, self._held)):
            self._held, self._captured = held, {}
        embedder._captured = self._captured
        if self._captured and not _embeds_as_captured(embedder, self._center_images[:2]):
            self._captured.clear()
        return embedder


def _embeds_as_captured(embedder: PublicEmbedder, images: Tensor) -> bool:
    """Return whether a network embeds a batch of public images as its captured function embeds each of them."""
    alone = embedder.embed_private(images)
    with torch.no_grad():
        together = embedder.embedding(images)
    return together.shape == alone.shape and bool((together - alone).norm() <= 1e-3 * alone.norm())
