"""State of one client's training in one round, which add-ons read and change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from distillkit._utils.batches import batch_indices, require_batch_statistics, uses_batch_statistics
from distillkit._utils.eval_mode import preserve_modes, train_mode
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


class Term(Protocol):
    """Interface of an object that adds a term to the loss of local training. Every add-on implements it."""

    @property
    def data_access(self) -> Literal["none", "example", "batch"]:
        """Use of private data by the term: "none", one "example" at a time, or a whole "batch" (see `AddOn`)."""

    def loss(self, step: Any) -> Tensor | None:
        """Return a scalar tensor to add to the loss of this `step`, or None to add nothing."""


class Local:
    """State of a client's training in one round. Every add-on hook that runs on a client gets it as `local`.

    The object is made when the client receives the message, and discarded when the reply is sent. All tensors are on
    the client's device.

    Args:
        settings: the method's options and its networks.
        client: client on which the training runs.
        message: message from the server.
        terms: the active add-ons, each of which may add a term to the loss of a step (`AddOn.loss`).

    Attributes:
        settings, client, message, terms: the arguments of the constructor.
        task: the classification task.
        round: index of the round being run, from 1.
        memory: message with the values that the client keeps between rounds, one for each `Entry`. Changes in this
            training are kept only if the server uses the client's reply.
        architecture: the name of the client's architecture; "" if there is only one.
        received: all parameters and buffers at the start of the training, by name.
        start: copy of the received values of the parameters that are shared with the server, by name.
        previous: parameters and buffers after this client's last training, by name; None in its first training, or if
            no add-on sets `needs_previous`.
        net: the network in training.
        network: the same network as `net`, split into features and classifier.
        layers: inner modules of `net` that add-ons read (`AddOn.layers`), by name.
        data: the training set. It is the client's own images, `client.data`, unless add-ons replace or extend them.
        counts: number of images of each class in the client's own images, int64 [K].
        weight: factor by which the method's objective is multiplied in the loss, initially 1. An add-on may change it
            in `before_training`.
        lr: this round's learning rate.
        steps: optimizer steps taken so far.
        phases: finished phases, each with the names of its trained parameters and its number of steps.
        dropout: generator from which the dropout layers of `net` draw.
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
        self.phases: list[tuple[frozenset[str], int]] = []

    # Values of one add-on.

    def scratch(self, addon: Component) -> dict[str, Any]:
        """Return the dict in which `addon` keeps values during this training. It is empty at first."""
        return self._scratch.setdefault(addon.key, {})

    def first_output(self, addon: Component) -> int:
        """Return the index of the first of the additional network outputs of `addon` (see `AddOn.extra_outputs`)."""
        return self.task.num_classes + self.settings.first_outputs[addon.key]

    def generator(self, addon: Component, purpose: str = "") -> torch.Generator:
        """Return a new generator for random draws of `addon`, from the run's seed, the round, the client and the
        add-on's key.

        Args:
            addon: add-on that draws.
            purpose: name of the draws. Use different names for independent draws.
        """
        return derive(self.client.seed, self.round, self.client.id, addon.key, purpose)

    # Weights and networks.

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained network's parameters that are shared with the server, by name. They are not copies."""
        return self._shared

    def trained_parameters(self, phase: Phase) -> dict[str, nn.Parameter]:
        """Return the parameters of the trained network `net` that are changed in a `phase` of the training, by name."""
        return {n: p for n, p in self._named.items() if p.requires_grad and phase.trains(n)}

    def new_network(self) -> nn.Module:
        """Return a new network with the received weights, in train mode. The caller may change it."""
        return train_mode(self.settings.networks.on(self.client, self.received))

    def at(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a frozen network with the given weights, in eval mode. It is made once for each `weights` object.

        Args:
            weights: parameters and buffers, by name; those that it lacks have the values of `received`.
        """
        known = self._twins.get(id(weights))
        if known is None:
            twin = self.settings.networks.on(self.client, {**self.received, **weights}).eval().requires_grad_(False)
            known = self._twins[id(weights)] = (weights, twin)
        return known[1]

    def state(self) -> Tensors:
        """Return a copy of the current parameters and buffers of `net`, by name."""
        return copied(self.net)

    @cached_property
    def delta(self) -> Tensors:
        """The change w_k - w (trained minus received value) of every shared parameter, by name.

        It is computed at the first access and then kept, so read it only after the training.
        """
        return {n: p.detach() - self.start[n] for n, p in self._shared.items()}

    def optimizer(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return a new optimizer for the tensors `params`, with the method's options and this round's learning rate."""
        options = self.settings.optimizer
        given: Any = {"params": list(params), "lr": self.lr, "weight_decay": options.weight_decay, "foreach": False}
        if options.name == "adam":
            return torch.optim.Adam(**given)
        return torch.optim.SGD(**given, momentum=self.settings.momentum)

    def prefixed(self, tensors: Tensors) -> Tensors:
        """Return tensors of this client's network under the names that they have in messages, "architecture/name".

        Args:
            tensors: tensors, by the names in the network's state dict.
        """
        return self.settings.networks.prefixed(tensors, self.architecture)

    def unprefixed(self, group: Tensors) -> Tensors:
        """Select the tensors of this client's architecture, and return them by the names in the network's state dict.

        Args:
            group: tensors from a message, under the names "architecture/name".
        """
        return self.settings.networks.unprefixed(group, self.architecture)

    # Images.

    @cached_property
    def has_batch_norm(self) -> bool:
        """True if the trained network normalizes with batch statistics."""
        with preserve_modes(self.net):
            return uses_batch_statistics(train_mode(self.net))

    @property
    def planned_steps(self) -> int:
        """Number of optimizer steps of all phases on `data`, if no add-on overrides `batches`."""
        order = torch.arange(len(self.data))
        passes = len(batch_indices(order, self.settings.batch, merge_single=self.has_batch_norm)) if len(order) else 0
        return sum(p.epochs * passes if p.steps is None else p.steps for p in self.settings.phases)

    def batches(self, data: LabeledImages, phase: Phase, purpose: str) -> Iterator[Batch]:
        """Yield shuffled and augmented batches of a set for one phase. An empty set has no batches.

        If the network has batch norm, a last batch of one image is merged into the batch before it.

        Args:
            data: set from which the batches are taken.
            phase: phase of the training, which sets the number of epochs or steps.
            purpose: name that identifies the random draws for the order and the augmentation; see `Client.generator`.
        """
        if not len(data):
            return
        generator, augment, size = self.client.generator(purpose), self.settings.augment, self.settings.batch
        with preserve_modes(self.net):
            require_batch_statistics(train_mode(self.net), data.images, min(size, len(data)), "factory")
        for index in shuffled_indices(
            len(data), size, generator, phase.epochs, phase.steps, self.has_batch_norm, data.images
        ):
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
        """Yield batches of an add-on's own set without end. The set is shuffled anew before each pass.

        Use this function in `AddOn.extra_batches`. The last batch of each pass may be smaller, see `batches`.

        Args:
            addon: add-on to which the set belongs. The random draws depend on the add-on's `key`.
            data: set from which the batches are taken.
            batch: images per batch; default: the method's batch size.
            joint: whether each batch is concatenated with the client's batch in the forward pass, so that both share
                batch-norm statistics. If False, the add-on's batch has a forward pass of its own.
            augment: function `augment(images, generator)`, applied to each batch.
        """
        generator, size = self.generator(addon, "stream"), batch or self.settings.batch
        while True:
            for index in shuffled_indices(len(data), size, generator, 1, None, self.has_batch_norm, data.images):
                part = replace(batch_at(data, index), joint=joint)
                if augment is not None:
                    changed = augment(part.images, generator)
                    if not isinstance(changed, Tensor) or changed.shape != part.images.shape:
                        came = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
                        raise ValueError(f"{addon.key}: augment must return {list(part.images.shape)}, got {came}")
                    part = replace(part, images=changed)
                yield part

    def fit(
        self, state: Tensors, owner: Component, phase: Phase, term: Callable[[nn.Module], Tensor] | None = None
    ) -> Tensors:
        """Train a second network of this client, such as Ditto's personal model, and return its weights.

        The network is trained on `data` with the method's objective and optimizer, without any add-on and with random
        draws of its own. If `data` is empty, `state` is returned unchanged.

        Args:
            state: initial parameters and buffers by name.
            owner: add-on that calls this function.
            phase: number of epochs or steps of the training, and the parameters to train.
            term: function that takes the network and returns a scalar tensor, which is added to the loss in each step.
        """
        if not len(self.data):
            return state
        net = self.settings.networks.on(self.client, state)
        seed_dropout(net, self.generator(owner, "dropout"))
        trained = [p for n, p in net.named_parameters() if p.requires_grad and phase.trains(n)]
        optimizer, objective = self.optimizer(trained), self.settings.objective_of(self.task)
        train_mode(net)
        for batch in self.batches(self.data, phase, owner.key):
            self.client.check_running()
            loss = objective(net(batch.images), batch.labels)
            if term is not None:
                loss = loss + term(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return copied(net)

    # Progress of the training.

    @cached_property
    def effective_lrs(self) -> dict[str, float]:
        """Distance by which a constant gradient of 1 would have moved each shared parameter in this training, by name.

        Read it after the training. With plain SGD and without `AddOn.damping` it is steps * lr; weight decay does not
        count.
        It is 0 for a parameter that was not trained. SCAFFOLD divides by it to get the mean gradient.
        """
        known: dict[tuple[int, ...], float] = {}
        found: dict[str, float] = {}
        for name in self._shared:
            steps = tuple(count for trained, count in self.phases if name in trained)
            if steps not in known:
                known[steps] = effective_lr(self.optimizer, steps, self.settings.damping)
            found[name] = known[steps]
        return found


def received_state(settings: Settings, client: Client, message: Message) -> Tensors:
    """Return all parameters and buffers of a client's model at the start of a round, on the client's device.

    Those that are never sent have the client's own values, all others the received ones.

    Args:
        settings: the method's options and its networks.
        client: client whose `memory` holds the values that are never sent.
        message: message from the server.
    """
    networks, classes = settings.networks, client.task.num_classes
    name = networks.architecture(client.id)
    state = networks.unprefixed(message[Entries.model], name)
    kept = settings.kept_by_client(networks.template(name, classes))
    if kept:
        own = client.memory.get(Entries.own) or networks.first(name, classes, client.seed)
        state |= {n: own[n].to(client.device) for n in kept}
    return state
