"""Public embedders: networks, independent of the private images, that map images to vectors of bounded length."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.augment import Augmentation, require_normalization
from distillkit.chunking import chunk_size
from distillkit.condense._mean_matching import MATCHES
from distillkit.networks._base import Network
from distillkit.networks.samplers import NetworkSampler
from distillkit.privacy._public_noise import public_noise, public_test_images
from distillkit.privacy.validation._independence import refuse_batch_norm, require_independent_rows
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = ["PublicEmbedder", "PublicEmbedders"]


class PublicEmbedder:
    """Embedder v(x), which maps private and synthetic images alike to vectors of bounded length.

    Because of the bound, adding noise to a sum of vectors makes the sum private. With phi the embedding and a the
    centre, v(x) = (phi(x) - a) / ||phi(x) - a||, or with a clip C, v(x) = (phi(x) - a) min(1, C / ||phi(x) - a||). Call
    an embedder with images [N, C, H, W]. `PublicEmbedders` creates the embedders of a release.

    Args:
        network: network that computes phi.
        center: public centre a, float [F]; None for no centre.
        clip: largest length C of a vector; None scales every vector to unit length.
        match: network output used as phi: `"embedding"`, or `"embedding+logits"` (both, concatenated).
        augment, state: augmentation that is drawn once for all images, and the seed and index from which that draw is
            derived.
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
        self.network, self.center, self.clip, self.match = network, center, clip, match
        self.augment, self.state = augment, state

    @property
    def sensitivity(self) -> float:
        """Largest l2 norm that one record adds to a sum of v: 1, or the clip."""
        return 1.0 if self.clip is None else self.clip

    def embedding(self, images: Tensor) -> Tensor:
        """Compute phi(x), before centring and clipping; every call applies the same draw of the augmentation.

        Args:
            images: float [N, C, H, W] in the space of the release.

        Returns:
            Float [N, F].
        """
        if self.augment is not None:
            images = self.augment(images, derive(self.state[0], "augment", self.state[1]), siamese=True)
        return self.plain(images)

    def plain(self, images: Tensor) -> Tensor:
        """Compute phi(x) without the augmentation.

        Args:
            images: float [N, C, H, W] in the space of the release.

        Returns:
            Float [N, F].
        """
        embedding = self.network.features(images)
        if self.match == "embedding":
            return embedding
        return torch.cat([embedding, self.network.classifier(embedding)], 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Compute v(x) of `images` [N, C, H, W]: the embedding, centred and bounded in length, float [N, F]."""
        vectors = self.embedding(images)
        if self.center is not None:
            vectors = vectors - self.center
        if self.clip == math.inf:
            return vectors
        length = vectors.norm(dim=1, keepdim=True)
        if self.clip is None:
            return vectors / length.clamp_min(1e-12)
        return vectors * (self.clip / length.clamp_min(self.clip))


class PublicEmbedders:
    """Sequence of the public embedders of one release, each with a network, a centre and a draw of the augmentation.

    Pass the same object to `class_sums` and `fit_to_means`, and its `sensitivity` to `release`. `embedders[k]` depends
    only on k and the seed. Use an embedder only until you request the next, because networks may be drawn in place.

    Args:
        networks: sampler of the networks, as in `distribution_matching`; it must not depend on the private data, except
            through earlier releases.
        num_networks: number of networks, with one embedder each.
        like: set with the shape, normalisation, dtype and device of the images; the images of this set are not used.
        clip: largest length of a vector; None scales every vector to unit length, so that there is no clip to tune.
        match: network output that is matched: `"embedding"`, or `"embedding+logits"` (both, concatenated; FedDM's Eq.
            8).
        augment: augmentation that can be drawn once for all images, such as `DSA()`.
        centers: number of smooth noise images whose mean embedding is the centre, 0 for no centre; or public images [n,
            C, H, W], such as a set that was released before. The closer the centre is to the mean embedding of the
            private images, the better unit vectors separate the classes.
        seed: public seed of networks, noise images and augmentations.

    Attributes:
        dim: number of dimensions F of a vector.

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
        self.clip = clip if clip is None or clip == math.inf else check.real_number(clip, "clip", above=0.0)
        check.one_of(match, "match", MATCHES)
        self._networks, self._match, self._augment, self._seed = networks, match, augment, seed
        self._centers: dict[int, Tensor] = {}
        if isinstance(centers, Tensor):
            check.batch_of_images(centers, "centers")
            self._center_images, self._centered = centers.detach().to(like.images), True
        else:
            count = check.positive_int(centers, "centers", least=0)
            self._center_images = public_noise(max(count, 4), like, derive(seed, "centre"))
            self._centered = count > 0
        if augment is not None:
            require_normalization(augment, like.normalization)
        first = self[0]
        noise = public_test_images(6, like, derive(seed, "try"))
        self._check_independence(first, noise, chunk_size(like.images))
        with torch.no_grad():
            self.dim = first.embedding(noise[:1]).shape[1]

    def _check_independence(self, first: PublicEmbedder, noise: Tensor, chunk: int) -> None:
        network, augment = first.network, self._augment
        refuse_batch_norm(network)
        modules = [network] if isinstance(network, nn.Module) else []
        sizes = sorted({5, 8, 16, chunk // 2, min(chunk, 256)} & set(range(2, chunk + 1)))
        require_independent_rows(first.plain, noise, f"the network {type(network).__name__}", *modules, sizes=sizes)
        if augment is None:
            return
        for k in range(8):  # an augmentation may mix images in some draws only

            def augmented(images: Tensor, k: int = k) -> Tensor:
                return augment(images, derive(self._seed, "augment", k), siamese=True)

            require_independent_rows(augmented, noise[:4], "augment with siamese=True (one draw for all images)")

    @property
    def sensitivity(self) -> float:
        """Largest l2 norm that one record adds to a class sum of one embedder: 1, or the clip."""
        return 1.0 if self.clip is None else self.clip

    def __len__(self) -> int:
        return self.num_networks

    def __getitem__(self, k: int) -> PublicEmbedder:
        network = self._networks.draw(derive(self._seed, "network", k))
        if self._centered and k not in self._centers:
            with torch.no_grad():
                self._centers[k] = self._embedder(network, None, k).embedding(self._center_images).mean(0)
        return self._embedder(network, self._centers.get(k), k)

    def _embedder(self, network: Network, center: Tensor | None, k: int) -> PublicEmbedder:
        return PublicEmbedder(
            network, center, clip=self.clip, match=self._match, augment=self._augment, state=(self._seed, k)
        )
