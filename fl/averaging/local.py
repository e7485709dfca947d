"""One client's training in one round: what an add-on sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from distillkit.augment._validation import Augment
from distillkit.networks import split
from distillkit.networks._dropout import seed_dropout
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl._components import Component
from fl.averaging._entries import Entries
from fl.averaging.optimizer import effective_lr
from fl.averaging.settings import Settings
from fl.batches import Batch, Phase, batch_at, shuffled_indices
from fl.message import Message, Tensors
from fl.networks import copied
from fl.participants import Client

__all__ = ["Local", "Term", "received_state"]


class Term(Protocol):
    """What adds a term to the loss of a local step, as `Step` sees it: every add-on is one."""

    @property
    def data_access(self) -> Literal["none", "example", "batch"]:
        """What it reads of private data: "nothing", one "example" at a time, or the "batch"; see `AddOn`."""
        ...

    def loss(self, step: Any) -> Tensor | None:
        """The term for this `step`, a tensor without dimensions, or None."""
        ...


class Local:
    """One client's training in one round, as an add-on's hooks see it: the argument `local` of every hook on a client.

    It is made when the client has received the message, and forgotten when the reply is sent. All tensors are where the
    client computes.

    Args:
        settings: the method's options and its networks.
        client: where the training runs.
        message: what the server said.
        terms: what adds to the loss of a step: the add-ons.

    Attributes:
        settings, client, message, terms: as given; `client.data` are the client's own images.
        task: what the labels mean.
        round: the round being run, from 1.
        memory: what the client keeps between rounds, by entry; what `end` writes is kept if the reply is used.
        architecture: the name of the client's architecture; "" where there is only one.
        received: the whole state that the training starts from, parameters and buffers, by name.
        start: w: of those the parameters that are shared with the server, a copy, by name.
        previous: this client's last trained state (parameters and buffers), if an add-on asked for it
            (`needs_previous`) and there is one; else None.
        net: the network in training.
        network: the same network, seen as features and classifier.
        layers: its inner modules that add-ons read (`AddOn.layers`), by name.
        data: the set that is trained on: the client's own, or the add-ons'.
        counts: images of each class in the client's own data, int64 [K].
        weight: factor of the base objective, 1; an add-on may change it in `begin`.
        lr: this round's learning rate.
        steps: optimiser steps taken so far.
        dropout: the generator that the dropout layers of `net` draw from.
    """

    def __init__(self, settings: Settings, client: Client, message: Message, terms: Sequence[Term] = ()) -> None:
        self.settings, self.client, self.message, self.task = settings, client, message, client.task
        self.round, self.memory, self.terms = client.round, client.memory, tuple(terms)
        self.weight, self.lr, self.steps = 1.0, settings.rate(client.round), 0
        self.architecture = settings.networks.architecture(client.id)
        self.received = received_state(settings, client, message)
        self.net = settings.networks.on(client, self.received)
        self.dropout = client.generator("dropout")
        seed_dropout(self.net, self.dropout)
        self.network = split(self.net)
        self.layers = {name: self.net.get_submodule(name) for name in settings.layers}
        self._named = dict(self.net.named_parameters())
        self._shared = {n: p for n, p in self._named.items() if not settings.is_personal(n)}
        self.start: Tensors = {n: p.detach().clone() for n, p in self._shared.items()}
        self.previous: Tensors | None = client.memory.get(Entries.last)
        self.counts = self.task.counts(client.data.labels)
        self.data = client.data
        self._scratch: dict[str, dict[str, Any]] = {}
        self._twins: dict[int, tuple[Mapping[str, Tensor], nn.Module]] = {}
        self._phases: list[tuple[frozenset[str], int]] = []

    # What belongs to an add-on.

    def scratch(self, addon: Component) -> dict[str, Any]:
        """The own values of `addon` for this training, from one hook to the next: a dict that is empty at first."""
        return self._scratch.setdefault(addon.key, {})

    def first_output(self, addon: Component) -> int:
        """The index of the first extra output of `addon` (see `AddOn.extra_outputs`): its labels begin there."""
        return self.settings.first_output(addon, self.task.num_classes)

    def generator(self, addon: Component, purpose: str = "") -> torch.Generator:
        """A new generator for what `addon` draws in this round at this client, named by `purpose`.

        A pure function of (seed, round, client, the add-on's key, purpose): no other draw changes, with or without it.
        """
        return derive(self.client.seed, self.round, self.client.id, addon.key, purpose)

    # Weights and networks.

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of `net` that are shared with the server, by name: at their current values, not copies."""
        return self._shared

    def trained_parameters(self, phase: Phase) -> dict[str, nn.Parameter]:
        """The parameters of `net` that a `phase` trains, by name."""
        return {n: p for n, p in self._named.items() if p.requires_grad and phase.trains(n)}

    def new_network(self) -> nn.Module:
        """A second network with the received weights, in train mode, for an add-on to change; one for each call."""
        return self.settings.networks.on(self.client, self.received).train()

    def at(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """A frozen twin of the network at other weights, in eval mode, to ask what they say (MOON's last model, say).

        Made once for each `weights` object, and kept until the training is over.

        Args:
            weights: by name; names that are missing keep the received values.
        """
        known = self._twins.get(id(weights))
        if known is None:
            twin = self.settings.networks.on(self.client, {**self.received, **weights}).eval().requires_grad_(False)
            known = self._twins[id(weights)] = (weights, twin)
        return known[1]

    def state(self) -> Tensors:
        """A copy of the current parameters and buffers of `net`, by name."""
        return copied(self.net)

    @cached_property
    def delta(self) -> Tensors:
        """w_k - w: trained minus received, for every shared parameter, by name; read it after the training, in `end`.

        It is computed once and kept.
        """
        return {n: p.detach() - self.start[n] for n, p in self._shared.items()}

    def optimizer(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """A new optimiser of the method's kind, at this round's rate, on the tensors `params`."""
        return self.settings.optimizer_for(params, self.lr)

    def prefixed(self, tensors: Tensors) -> Tensors:
        """The `tensors` of this client's network under their names in a message: "architecture/name" with several."""
        return self.settings.networks.prefixed(tensors, self.architecture)

    def unprefixed(self, group: Tensors) -> Tensors:
        """Of a `group` in a message, what belongs to this client's architecture, under the network's own names."""
        return self.settings.networks.unprefixed(group, self.architecture)

    # Images.

    @property
    def planned_steps(self) -> int:
        """How many steps all phases will take on `data`, where no add-on makes the batches."""
        passes = -(-len(self.data) // self.settings.batch)
        return sum(p.epochs * passes if p.steps is None else p.steps for p in self.settings.phases)

    def batches(self, data: LabeledImages, phase: Phase, purpose: str) -> Iterator[Batch]:
        """Shuffled and augmented batches of a set for one phase, as the client's own images come; none of an empty set.

        Args:
            data: the set.
            phase: how long: its epochs or steps.
            purpose: names the draws of order and augmentation, see `Client.generator`.
        """
        if not len(data):
            return
        generator, augment = self.client.generator(purpose), self.settings.augment
        for index in shuffled_indices(len(data), self.settings.batch, generator, phase.epochs, phase.steps):
            batch = batch_at(data, index)
            yield batch if augment is None else replace(batch, images=augment(batch.images, generator))

    def stream(
        self,
        addon: Component,
        data: LabeledImages,
        *,
        batch: int | None = None,
        joint: bool = False,
        augment: Augment | None = None,
    ) -> Iterator[Batch]:
        """Batches of an add-on's own set without end, for its hook `extra_batches`: one random order after the other.

        The last batch of each order is short if they do not divide.

        Args:
            addon: whose set it is; the draws are its own.
            data: the set.
            batch: images in a batch; default: the method's.
            joint: whether they go through the network together with the real batch, so that both share batch
                statistics, or alone.
            augment: applied to each batch.
        """
        generator = self.generator(addon, "stream")
        while True:
            for index in shuffled_indices(len(data), batch or self.settings.batch, generator, 1, None):
                part = replace(batch_at(data, index), joint=joint)
                yield part if augment is None else replace(part, images=augment(part.images, generator))

    def fit(
        self, state: Tensors, owner: Component, phase: Phase, term: Callable[[nn.Module], Tensor] | None = None
    ) -> Tensors:
        """Train a second network of this client beside `net`: a personal model, say (Ditto).

        On `data`, by the method's objective and optimiser. The add-ons have no part in it and all draws are the owner's
        own, so that the training of `net` is left alone bit by bit. Without images nothing moves.

        Args:
            state: to start from, parameters and buffers by name.
            owner: the add-on that wants it.
            phase: how long to train, and which parameters.
            term: added to the loss in each step, a function of the network.

        Returns:
            The trained parameters and buffers, by name.
        """
        if not len(self.data):
            return state
        net = self.settings.networks.on(self.client, state)
        seed_dropout(net, self.generator(owner, "dropout"))
        trained = [p for n, p in net.named_parameters() if p.requires_grad and phase.trains(n)]
        optimizer, objective = self.optimizer(trained), self.settings.objective_of(self.task)
        net.train()
        for batch in self.batches(self.data, phase, owner.key):
            self.client.check_running()
            loss = objective(net(batch.images), batch.labels)
            if term is not None:
                loss = loss + term(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return copied(net)

    # How far the training has gone.

    def record_phase(self, trained: Mapping[str, object], steps: int) -> None:
        """Remember that a phase trained the parameters of these names for so many `steps`."""
        self._phases.append((frozenset(trained), steps))

    @cached_property
    def effective_lrs(self) -> dict[str, float]:
        """How far a constant unit gradient would have moved each shared parameter, by name; 0 for one not trained.

        Read it after the training. Same optimiser, steps and damping as in training, no weight decay. SCAFFOLD divides
        the change by it to get the mean gradient: with plain SGD and no damping it is steps x lr, with momentum more.
        """
        known: dict[tuple[int, ...], float] = {}
        found: dict[str, float] = {}
        for name in self._shared:
            steps = tuple(count for trained, count in self._phases if name in trained)
            if steps not in known:
                known[steps] = effective_lr(self.optimizer, steps, self.settings.damping)
            found[name] = known[steps]
        return found

    @property
    def effective_lr(self) -> float:
        """The one value in `effective_lrs`; 0 if no shared parameter was trained.

        Raises:
            ValueError: phases that train different shared parameters have moved them by different distances.
        """
        found = {distance for distance in self.effective_lrs.values() if distance > 0}
        if len(found) > 1:
            raise ValueError(
                "the phases move the shared parameters by different distances, so there is no single path: "
                f"train all shared parameters in one phase, got phases={self.settings.phases}"
            )
        return max(found, default=0.0)


def received_state(settings: Settings, client: Client, message: Message) -> Tensors:
    """The whole state that a client starts from: what was sent, and what it keeps itself (at first, as drawn).

    Args:
        settings: what stays with a client, and its network.
        client: whose `memory` holds what never travels.
        message: what the server sent.

    Returns:
        Parameters and buffers, by the network's own names, where the client computes.
    """
    networks, classes = settings.networks, client.task.num_classes
    name = networks.architecture(client.id)
    state = networks.unprefixed(message[Entries.model], name)
    kept = settings.kept_by_client(networks.template(name, classes))
    if kept:
        own = client.memory.get(Entries.own) or networks.first(name, classes, client.seed)
        state |= {n: own[n].to(client.device) for n in kept}
    return state
