"""Networks that are trained on a released set, and then used to embed the private images for the next release."""

from __future__ import annotations

import torch

from distillkit._utils import check
from distillkit._utils.configurable import Configurable
from distillkit.networks._base import Network, split
from distillkit.networks._factory import NetworkFactory, build, frozen_copy
from distillkit.networks._initialization import Redraw
from distillkit.privacy.validation._arguments import refuse_lost_guarantee
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages
from distillkit.training import Protocol, require_protocol, train


class TrainedNetworks(Configurable):
    """Sampler that trains a new network from scratch on a public set for every draw.

    With the option `passes=Passes(train=...)`, `condense_private` uses this sampler for every release of class means
    after the first. You can also pass it to `PublicEmbedders` as `networks`. The networks depend only on public data,
    so they may embed private images. Embeddings by trained networks separate the classes better than embeddings by
    untrained networks.

    Papers: DM embeds with untrained networks (Zhao and Bilen, WACV 2023). IDM matches with networks that were trained
    on the synthetic images (Zhao et al., "Improved distribution matching for dataset condensation", CVPR 2023).
    Deviation: IDM keeps a queue of networks and continues to train them while the images change. Here each network is
    trained once and then stays fixed.

    Args:
        factory: function without arguments that returns a network with the device and dtype of `data`. Its parameters
            are initialized again for each draw.
        data: public set on which the networks are trained.
        protocol: training protocol of the networks (epochs, optimizer, augmentation).
        redraw: function that initializes parameters for which no initialization rule is known; see
            `networks.initialize`.
        progress: whether to show a progress bar on a terminal.

    Networks are cached. If you call `draw` again with a generator in the same state, it returns the same network
    without training.

    Raises:
        PrivacyError: `data` has lost its guarantee (`info["epsilon"]` is None).
        TypeError: `data` is not a set, or `protocol` is not a `Protocol`.
    """

    fixed = False

    def __init__(
        self,
        factory: NetworkFactory,
        data: LabeledImages,
        protocol: Protocol,
        *,
        redraw: Redraw | None = None,
        progress: bool = True,
    ) -> None:
        require_protocol(protocol)
        refuse_lost_guarantee(check.instance(data, LabeledImages, "data", "a public LabeledImages").info, "data")
        self._factory, self._data, self._protocol, self._redraw = factory, data, protocol, redraw
        self._progress = check.boolean(progress, "progress")
        self._drawn: dict[bytes, Network] = {}

    def draw(self, generator: torch.Generator) -> Network:
        """Return a trained network, frozen and in eval mode.

        Args:
            generator: generator of the initial weights and the order of the batches; the same state gives the same
                network.
        """
        generator = as_generator(generator)
        state = generator.get_state().numpy().tobytes()
        if state not in self._drawn:
            network = build(self._factory, generator, self._redraw)
            train(network, self._data, self._protocol, generator=generator, progress=self._progress)
            self._drawn[state] = split(frozen_copy(network).eval())
        return self._drawn[state]

    def __repr__(self) -> str:
        return f"TrainedNetworks(on {len(self._data)} images, {self._protocol.epochs} epochs)"
