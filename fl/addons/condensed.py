"""FedLGD's federated virtual learning: clients train on small sets that are condensed from their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Generator, nn

from distillkit._utils.options import Decay, NonNegativeInt, Positive, PositiveInt, Rounds
from distillkit._utils.user_warnings import without_warnings
from distillkit.augment import DSA, Augmentation, require_augmentation
from distillkit.condense import distribution_matching
from distillkit.networks import FixedNetwork, RandomNetworks
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.averaging import AddOn, Local
from fl.message import Entry
from fl.participants import Client, Server

__all__ = ["SELECTED", "Condensed", "condense_client"]

SELECTED = tuple(range(1, 52, 5))
"""FedLGD's rounds of local and global distillation (tau): 1, 6, ..., 51."""


@dataclass(frozen=True)
class Condensed(AddOn):
    """Train on condensed data: FedLGD's local half (Huang et al., TMLR 2024, section 3.3.1, Algorithm 1, lines 9-20).

    Clients train on a small set that was condensed from their data, in place of the data. When a client is drawn for
    the first time, it condenses its data by distribution matching under random networks. In the `selected` rounds, the
    client refines this set under the received global network, which is fixed during the refinement ("iterative
    distribution matching", Eq. 1). Any method of local training can then use the set. `refine_steps=0` gives the sets
    of the paper's baselines. `ipc=0` disables the add-on. Classes that a client does not have are left out.

    Deviations. As in the authors' code, no set is refined in round 1, because the network is untrained. A client
    condenses its data when it is first drawn. In the authors' code, all clients do so before round 0, with the same
    result. The authors' code starts from statistics divided by the pixels of the whole set
    (`init="statistics-whole-set"`); the paper, and the default here, divide by the pixels of the class. In that code,
    the first condensation always uses a `ConvNet`; here, `factory` can return one.

    Args:
        ipc: number of images per class; the paper uses 10 and 50.
        steps: number of matching steps of the first condensation.
        refine_steps: number of matching steps of each refinement.
        selected: rounds, counted from 1, in which to refine the set.
        init: source of the initial images (see `initial_images`): "statistics", "statistics-whole-set", "noise" or
            "real".
        factory: function without arguments that returns a network for the first condensation; default: the client's own
            architecture.
        batch_real: number of real images per class in each step.
        lr, momentum: rate and momentum of SGD on the images.
        augment: differentiable Siamese augmentation of real and condensed images, or None.
    """

    key = "Condensed"
    disabled_at_zero = ("ipc",)
    ipc: NonNegativeInt = 50
    steps: NonNegativeInt = 10_000
    refine_steps: NonNegativeInt = 100
    selected: Rounds = SELECTED
    init: Literal["statistics", "statistics-whole-set", "noise", "real"] = "statistics"
    factory: Callable[[], nn.Module] | None = field(default=None, repr=False)
    batch_real: PositiveInt = 256
    lr: Positive = 1.0
    momentum: Decay = 0.5
    augment: Augmentation | None = field(default_factory=DSA)
    single_label = True
    own = Entry[LabeledImages]("first")

    def start(self, server: Server) -> None:
        """Refuse an augmentation that does not fit the clients' images."""
        require_augmentation(self.augment, server.normalization)

    def dataset(self, local: Local) -> LabeledImages:
        """Return the condensed set for training: a new set, a refined set, or the set in the client's memory."""

        def like() -> nn.Module:
            return local.new_network()

        own = self.first(local.client, like)
        if local.round in self.selected and local.round > 1 and self.refine_steps:
            own = self._matched(local.client, FixedNetwork(local.at(local.start)), own, self.refine_steps, "refine")
            local.memory[self.own] = own
        return own

    def first(self, client: Client, like: Callable[[], nn.Module]) -> LabeledImages:
        """Return the set in the client's memory; if there is none, condense one under random networks and keep it.

        Args:
            client: client whose data are condensed, and whose memory holds the set.
            like: function that returns a network of the client's own architecture; used if there is no `factory`.
        """
        own = client.memory.get(self.own)
        if own is None:
            networks = RandomNetworks(lambda: (self.factory or like)().to(client.device))
            own = client.memory[self.own] = self._matched(client, networks, self.init, self.steps, "condense")
        return own

    def _matched(
        self, client: Client, networks: NetworkSampler, start: str | LabeledImages, steps: int, purpose: str
    ) -> LabeledImages:
        generator = derive(client.seed, client.round, client.id, self.key, purpose)
        data = client.data.replace(columns={})
        return condense_client(self, client, data, networks, generator, steps=steps, init=start)


@without_warnings()  # a client may own fewer images of a class than ipc, as in the papers
def condense_client(
    options: Any, client: Client, data: LabeledImages, networks: NetworkSampler, generator: Generator, **further: Any
) -> LabeledImages:
    """Condense a client's data by distribution matching, with the options of an add-on or a method.

    Args:
        options: object with the attributes `ipc`, `batch_real`, `lr`, `momentum` and `augment`.
        client: client that condenses its data. If the run is stopped, the call ends.
        data: data to condense.
        networks: sampler that draws the networks.
        generator: generator of all other random draws.
        further: additional options of `distillkit.condense.distribution_matching`.
    """
    names = ("ipc", "batch_real", "lr", "momentum", "augment")
    return distribution_matching(
        data, networks=networks, generator=generator, callback=lambda _: client.check_running(), progress=False,
        **{name: getattr(options, name) for name in names}, **further,
    )  # fmt: skip
