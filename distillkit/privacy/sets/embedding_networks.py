"""Options for the public networks that embed images in private condensation."""

from __future__ import annotations

from dataclasses import dataclass

from distillkit.augment import Augmentation
from distillkit.networks._validation import require_sampler
from distillkit.networks.convnet import ConvNet
from distillkit.networks.samplers import NetworkSampler, RandomNetworks
from distillkit.sets import LabeledImages

__all__ = ["EmbeddingNetworks"]


@dataclass(frozen=True)
class EmbeddingNetworks:
    """Public networks that embed the images, with the output, augmentation and batch size to use.

    `condense_private` and `image_sgd` accept it as `networks=` wherever they accept a sampler.

    Args:
        sampler: draws the networks. It must not depend on the private data, except through earlier releases. None:
            `RandomNetworks` of a ConvNet of width 128, with depth 3 or as deep as the image size allows.
        match: the output that is matched: `"embedding"`, or `"embedding+logits"` (both, concatenated). None: the
            default of the call.
        augment: an augmentation such as `DSA()`, with one draw per network for private and synthetic images.
        chunk: images per pass; default by device and image size.
    """

    sampler: NetworkSampler | None = None
    match: str | None = None
    augment: Augmentation | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, networks: NetworkSampler | EmbeddingNetworks | None) -> EmbeddingNetworks:
        """Return options as they are, and wrap a sampler (or None) in default options.

        Raises:
            TypeError: neither options nor a sampler, for instance a network or a factory of networks.
        """
        if networks is None or isinstance(networks, EmbeddingNetworks):
            return networks or cls()
        return cls(require_sampler(networks))

    def sampler_for(self, like: LabeledImages) -> NetworkSampler:
        """Return the sampler, or the default for the shape, class count, device and dtype of `like`."""
        if self.sampler is not None:
            return require_sampler(self.sampler)
        depth = min(3, min(like.shape[1:]).bit_length() - 1)
        shape, classes, images = like.shape, max(2, like.num_classes), like.images
        return RandomNetworks(lambda: ConvNet(shape, classes, depth=depth).to(images.device, images.dtype))
