"""FedLGD's federated virtual learning: clients train on small sets that are condensed from their data."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, nn

from distillkit._utils import check
from distillkit._utils.display import stable_repr
from distillkit._utils.options import Decay, LearningRate, NonNegativeInt, PositiveInt, Rounds
from distillkit._utils.provenance import versions
from distillkit._utils.user_warnings import without_warnings
from distillkit.augment import DSA, Augmentation, require_augmentation
from distillkit.condense import Progress, distribution_matching, load_state, save_state
from distillkit.condense._condensation import call_identity
from distillkit.fingerprint import tensor_fingerprint
from distillkit.networks import FixedNetwork, RandomNetworks
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.averaging import AddOn, Local
from fl.averaging._trials import try_augmentation
from fl.message import Entry
from fl.participants import Client, Interrupted, Server

SELECTED = tuple(range(1, 52, 5))
"""FedLGD's rounds of local and global distillation (tau): 1, 6, ..., 51."""

SAVE_INTERVAL = 60.0
"""Seconds between two saved states of a client's condensation."""


@dataclass(frozen=True)
class Condensed(AddOn):
    """Local training on condensed data, from FedLGD (Huang et al., TMLR 2024, section 3.3.1, Algorithm 1, lines 9-20).

    Clients train on a small set that was condensed from their data, in place of the data. When a client is drawn for
    the first time, it condenses its data by distribution matching under random networks. In the `selected` rounds, the
    client refines this set by distribution matching under the received global network ("iterative distribution
    matching", Eq. 1). With `refine_steps=0`, sets are never refined. A set has no images of classes that its client
    does not have.

    Deviations. As in the authors' code, no set is refined in round 1, because the network is untrained. In the authors'
    code, all clients condense their data before the first round; here, a client does so when it is first drawn, which
    leads to the same sets. The authors' code draws the initial images from the mean and standard deviation of each
    class. It computes both from sums over the pixels of the class, which it divides by the number of pixels of the
    whole set (`init="statistics-whole-set"`). The paper, and the default here, divide by the number of pixels of the
    class. In the authors' code, the first condensation always uses a `ConvNet`; here, pass `factory` for this.

    Args:
        ipc: number of images per class; the paper uses 10 and 50. 0 disables the add-on.
        steps: number of matching steps of the first condensation.
        refine_steps: number of matching steps of each refinement.
        selected: indices of the rounds, from 1, in which clients refine their sets.
        init: source of the initial images (see `distillkit.condense.initial_images`): "statistics",
            "statistics-whole-set", "noise" or "real".
        factory: function without arguments that returns a network for the first condensation. Default: networks of the
            client's own architecture.
        batch_real: number of real images per class in each step.
        lr, momentum: learning rate and momentum of SGD on the pixels.
        augment: differentiable Siamese augmentation of real and condensed images, or None.
    """

    disabled_at_zero = ("ipc",)
    ipc: NonNegativeInt = 50
    steps: NonNegativeInt = 10_000
    refine_steps: NonNegativeInt = 100
    selected: Rounds = SELECTED
    init: Literal["statistics", "statistics-whole-set", "noise", "real"] = "statistics"
    factory: Callable[[], nn.Module] | None = field(default=None, repr=False)
    batch_real: PositiveInt = 256
    lr: LearningRate = 1.0
    momentum: Decay = 0.5
    augment: Augmentation | None = field(default_factory=DSA)
    single_label = True
    own = Entry[LabeledImages]("first")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factory is not None:
            check.callable_with(self.factory, "factory", (), "`lambda: ConvNet((3, 32, 32), 10)`", classes=True)

    def start(self, server: Server) -> None:
        """Refuse an augmentation that was created for another normalization than that of the clients' images."""
        require_augmentation(self.augment, server.normalization)
        try_augmentation(server, self.augment, f"{self.name}: augment")

    def dataset(self, local: Local) -> LabeledImages:
        """Return the client's condensed set as training set. In the client's first round, condense its data.

        In the rounds that the option `selected` lists, except round 1, first refine the set by distribution matching
        under the received global network.
        """
        own = self.first(local.client, local.new_network)
        if local.round in self.selected and local.round > 1 and self.refine_steps:
            own = self._matched(local.client, FixedNetwork(local.at(local.start)), own, self.refine_steps, "refine")
            local.memory[self.own] = own
        return own

    def first(self, client: Client, like: Callable[[], nn.Module]) -> LabeledImages:
        """Return the condensed set in the client's memory.

        If there is none, condense the client's data and store the set.

        Args:
            client: client whose data are condensed, and whose memory holds the set.
            like: function that returns a network of the client's own architecture. It is called if the option `factory`
                is None.
        """
        own = client.memory.get(self.own)
        if own is None:
            make = self.factory or like
            networks = RandomNetworks(
                lambda: check.instance(make(), nn.Module, "the result of factory", "an nn.Module").to(client.device)
            )
            own = client.memory[self.own] = self._matched(client, networks, self.init, self.steps, "condense")
        return own

    def _matched(
        self, client: Client, networks: NetworkSampler, start: str | LabeledImages, steps: int, purpose: str
    ) -> LabeledImages:
        generator = derive(client.seed, client.round, client.id, self.key, purpose)
        data = client.data.replace(columns={})
        if not len(data):
            return data
        options: dict[str, Any] = {"cached": purpose == "condense", "steps": steps, "init": start}
        return condense_client(self, client, data, networks, generator, purpose, **options)


@without_warnings()  # a client may own fewer images of a class than ipc, as in the papers
def condense_client(
    options: Any, client: Client, data: LabeledImages, networks: NetworkSampler, generator: Generator, purpose: str,
    cached: bool = False, **further: Any,
) -> LabeledImages:  # fmt: skip
    """Condense a client's data by distribution matching, and return the synthetic set.

    If the run has a folder, the condensation's state is saved there once a minute, and an interrupted condensation is
    resumed.

    Args:
        options: add-on or method with the attributes `ipc`, `batch_real`, `lr`, `momentum` and `augment`.
        client: client that condenses its data. If its run is being stopped, the next step raises `Interrupted`.
        data: data to condense.
        networks: sampler that draws the networks for distribution matching.
        generator: generator of all other random draws.
        purpose: name of the file in which the condensation's state is saved.
        cached: whether to reuse a set that another run saved in a cache folder which both runs use. Data, networks,
            draws and options must be equal. The CPU time that the other run spent on the set is added to
            `client.seconds`.
        further: further options of `distillkit.condense.distribution_matching`.
    """
    names = ("ipc", "batch_real", "lr", "momentum", "augment")
    given = {**{name: getattr(options, name) for name in names}, **further}
    cache = None if client.scratch is None or not cached else client.scratch.cache
    if cache is not None:
        facts = {**call_identity(data, networks), "device": str(client.device), **versions()}
        facts |= {name: stable_repr(value) for name, value in given.items()}
        draws = tensor_fingerprint([generator.get_state(), json.dumps(facts, sort_keys=True)])
        cache = cache / f"{draws}.safetensors"
    return distribution_matching(
        data, networks=networks, generator=generator, progress=False, **_checkpoints(client, purpose, cache), **given
    )


def _checkpoints(client: Client, purpose: str, cache: Path | None) -> dict[str, Any]:
    """Return the options `callback` and `resume` with which a condenser saves its state to a file and resumes from it.

    The file is in the client's scratch folder.
    """
    scratch, began, cpu = client.scratch, time.monotonic(), time.thread_time()
    if scratch is None:
        return {"callback": lambda _: client.check_running()}
    path, saved, state = scratch.folder / f"{purpose}.safetensors", began, None
    for place in (cache, path):
        with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged state is computed again
            state = load_state(place) if place is not None and state is None else state
    spent = float(state["seconds"]) if state is not None else 0.0
    client.seconds += spent

    def callback(progress: Progress) -> None:
        nonlocal saved
        now, done = time.monotonic(), progress.step == progress.steps
        stops = not done and (scratch.late or client.stop.is_set())
        kept = done and (cache or scratch.deadline or state or now - began >= 10)
        if stops or kept or now - saved >= SAVE_INTERVAL:
            place, saved = cache if done and cache else path, now
            place.parent.mkdir(parents=True, exist_ok=True)
            seconds = torch.tensor(spent + time.thread_time() - cpu, dtype=torch.float64)
            save_state(place, {**progress.state(), "seconds": seconds})
        if stops:
            raise Interrupted(f"client {client.id} stopped at its deadline, after step {progress.step}")
        client.check_running()

    return {"callback": callback, "resume": state}
