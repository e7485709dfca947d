"""FedLGD's federated virtual learning: clients train on small sets that are condensed from their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Generator, nn

from distillkit._utils.user_warnings import without_warnings
from distillkit.augment import DSA, Augmentation, require_augmentation
from distillkit.condense import distribution_matching
from distillkit.networks import FixedNetwork, RandomNetworks
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl._options import Decay, NonNegativeInt, Positive, PositiveInt, Rounds
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
    the first time it condenses its data by distribution matching under random networks. In the `selected` rounds it
    refines that set under the received global network, which stays fixed meanwhile ("iterative distribution matching",
    Eq. 1). Any method can then train on the set. With `refine_steps=0` it is the preparation of the paper's baselines.
    `ipc=0` disables the add-on. Classes that a client does not have are left out.

    Deviations. In round 1 nothing is refined (as released), because the network is untrained. A client condenses when
    it is first drawn, the release before round 0: the set is the same, unless the client is never drawn. The release
    starts from statistics divided by the whole set's pixels (`init="statistics-whole-set"`; the paper, and the default,
    divide by the class's own), and its first condensation always draws a `ConvNet` (`factory`).

    Args:
        ipc: images per class; the paper takes 10 and 50.
        steps: matching steps of the first condensation.
        refine_steps: matching steps of each refinement.
        selected: the rounds, from 1, in which to refine.
        init: see `initial_images`: "statistics", "statistics-whole-set", "noise" or "real".
        factory: `factory()` returns the networks of the first condensation; default: the client's own architecture.
        batch_real: real images per class and step.
        lr, momentum: of SGD on the images.
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
        """Return the condensed set to train on: new, refined, or from the client's memory."""

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
            client: whose data it is, and whose memory.
            like: `like()` returns a network of the client's own architecture, used without `factory`.
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
        options: has `ipc`, `batch_real`, `lr`, `momentum` and `augment`.
        client: the client; its stop ends the call.
        data: the data to condense.
        networks: draws the networks.
        generator: draws everything else.
        further: other options of `distillkit.condense.distribution_matching`.
    """
    names = ("ipc", "batch_real", "lr", "momentum", "augment")
    return distribution_matching(
        data, networks=networks, generator=generator, callback=lambda _: client.check_running(), progress=False,
        **{name: getattr(options, name) for name in names}, **further,
    )  # fmt: skip
