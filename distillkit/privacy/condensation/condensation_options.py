"""Options of private condensation: the embedding networks, and the number of passes.

Each pass releases noised class means of embeddings, and fits synthetic images to these means.
"""

from __future__ import annotations

from dataclasses import dataclass

from distillkit._utils import check
from distillkit._utils.options import AtLeastTwo, NonNegativeInt, PositiveInt, check_options
from distillkit.augment import Augmentation
from distillkit.networks._validation import require_sampler
from distillkit.networks.convnet import ConvNet
from distillkit.networks.samplers import NetworkSampler, RandomNetworks
from distillkit.sets import LabeledImages
from distillkit.training import Protocol, require_protocol


@dataclass(frozen=True)
class EmbeddingNetworks:
    """Public networks that embed the images, with the network output, augmentation and batch size to use.

    Pass the object to `condense_private` or `image_sgd` as `networks=`, in place of a network sampler.

    Args:
        networks: sampler of the networks. It must not depend on the private data, except through earlier releases.
            Default: `RandomNetworks` of a ConvNet of width 128 and depth 3; the depth is smaller for small images.
        match: network output that is matched: `"embedding"`, or `"embedding+logits"` (both, concatenated). By default,
            `condense_private` matches the embedding, and `image_sgd` matches both.
        augment: augmentation such as `DSA()`, drawn once per network and applied to private and synthetic images alike.
        chunk: number of images per forward or backward pass; the default depends on device and image size.
    """

    networks: NetworkSampler | None = None
    match: str | None = None
    augment: Augmentation | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, networks: NetworkSampler | EmbeddingNetworks | None) -> EmbeddingNetworks:
        """Convert the argument `networks=` of a condenser to an `EmbeddingNetworks`.

        An `EmbeddingNetworks` is returned unchanged. A sampler gives an `EmbeddingNetworks` with this sampler and the
        defaults of the other arguments. None gives an `EmbeddingNetworks` with all defaults.

        Raises:
            TypeError: `networks` is not an `EmbeddingNetworks`, a sampler or None, but for instance a network or a
                factory of networks.
        """
        if networks is None or isinstance(networks, EmbeddingNetworks):
            return networks or cls()
        return cls(require_sampler(networks))

    def sampler_for(self, like: LabeledImages) -> NetworkSampler:
        """Return the sampler `networks`, or a default sampler if it is None.

        Args:
            like: image set. The networks of the default sampler fit its image shape, number of classes, device and
                dtype.
        """
        if self.networks is not None:
            return require_sampler(self.networks)
        depth = min(3, min(like.shape[1:]).bit_length() - 1)
        shape, classes, images = like.shape, max(2, like.num_classes), like.images
        return RandomNetworks(lambda: ConvNet(shape, classes, depth=depth).to(images.device, images.dtype))


@dataclass(frozen=True)
class Passes:
    """Number of passes of `condense_private`, and the split of the Gaussian budget (sum of 1 / sigma^2) among them.

    Each pass releases noised class sums of embeddings and fits images to them. Before embeddings are scaled to unit
    length, a center is subtracted. Each pass after the first starts from the images of the previous pass, and its
    center is the mean embedding of these images. The passes after the first share the remaining budget equally.

    Args:
        count: number of passes, including the first; at least 2.
        histogram_share: share of the budget, in (0, 0.5], for the noised class sizes. The class sums are divided by
            these sizes. Not used if the class sizes are public.
        first_share: share of the budget for the first pass, in [0, 0.5]. 0 skips the first pass, and the center of the
            second pass is then the mean embedding of smooth noise.
        first_num_networks, first_steps: number of networks and number of fitting steps of the first pass.
        train: protocol with which the networks of every later pass are trained on the set of the previous pass (see
            `TrainedNetworks`). The sampler in the argument `networks` of `condense_private` must then be a
            `RandomNetworks`. None: all networks are untrained. Trained networks give far better embeddings if the noise
            is small, as it is with thousands of records per class. If the noise is large, the networks learn the noise.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """

    count: AtLeastTwo = 2
    histogram_share: float = 0.05
    first_share: float = 0.2
    first_num_networks: PositiveInt = 5
    first_steps: NonNegativeInt = 100
    train: Protocol | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check.real_number(self.histogram_share, "histogram_share", above=0.0, most=0.5)
        check.real_number(self.first_share, "first_share", least=0.0, most=0.5)
        if self.first_share + self.histogram_share == 1:
            raise ValueError("first_share + histogram_share must be below 1, got 1: nothing is left for the last pass")
        if self.train is not None:
            require_protocol(self.train)
