"""One client's training in one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from distillkit.augment.contract import Augment
from distillkit.networks import split
from distillkit.networks.dropout import seed_dropout
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.averaging.addon import AddOn, fills
from fl.averaging.moments import moments, resume
from fl.averaging.path import unit_path
from fl.averaging.step import Step
from fl.batches import Batch, Phase, rows, shuffled
from fl.message import Message, Tensors
from fl.method import Client

if TYPE_CHECKING:
    from fl.averaging.fedavg import FedAvg

__all__ = ["Local"]


class Local:
    """What an add-on sees of a client's training in one round.

    Attributes:
        method, client, message: who trains, where, and what the server said.
        task: what the labels mean.
        start: the received parameters, by name.
        previous: this client's last trained state (parameters and buffers), if an add-on asked for it and there is one.
        net: the network in training (`network` is its features/classifier view, `layers` the inner ones that add-ons
            read); `shared_parameters()` are the parameters that are shared with the server.
        data: the set that is trained on.
        counts: images of each class in the client's own data, int64 [K].
        weight: factor of the base objective; an add-on may change it in `begin`.
        lr: this round's learning rate.
        steps: optimiser steps taken so far.
        dropout: the generator that the dropout layers of `net` draw from.
    """

    def __init__(self, method: FedAvg, client: Client, message: Message) -> None:
        self.method, self.client, self.message, self.task = method, client, message, client.task
        self.round, self.memory = client.round, client.memory
        self.weight, self.lr, self.steps = 1.0, method.lr * method.lr_decay ** (client.round - 1), 0
        self.received: Tensors = method.state_for(client, message)
        self.net = method.network_at(client, self.received)
        self.dropout = client.generator("dropout")
        seed_dropout(self.net, self.dropout)
        self.network = split(self.net)
        self.layers = {name: self.net.get_submodule(name) for a in method.addons for name in a.layers}
        self._named = dict(self.net.named_parameters())
        self._shared = {n: p for n, p in self._named.items() if not method.is_personal(n)}
        self.start: Tensors = {n: p.detach().clone() for n, p in self._shared.items()}
        self.previous: Tensors | None = client.memory.get(method.last)
        self.counts = self.task.counts(client.data.labels)
        self.data = client.data
        self._scratch: dict[str, dict[str, Any]] = {}
        self._twins: dict[int, tuple[Mapping[str, Tensor], nn.Module]] = {}
        self._phases: list[tuple[frozenset[str], int]] = []

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The shared parameters in training, by name."""
        return self._shared

    def trained_parameters(self, phase: Phase) -> dict[str, nn.Parameter]:
        """The parameters that a phase trains, by name."""
        return {n: p for n, p in self._named.items() if p.requires_grad and phase.trains(n)}

    def scratch(self, addon: AddOn) -> dict[str, Any]:
        """An add-on's scratch values for this training."""
        return self._scratch.setdefault(addon.key, {})

    def first_output(self, addon: AddOn) -> int:
        """The index of the add-on's first extra output."""
        return self.method.first_output(addon, self.task.num_classes)

    def generator(self, addon: AddOn, purpose: str = "") -> torch.Generator:
        """An add-on's own generator for this round and client."""
        return derive(self.client.seed, self.round, self.client.id, addon.key, purpose)

    def at(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """A frozen twin in eval mode at other weights; names that are missing keep the received values."""
        known = self._twins.get(id(weights))
        if known is None:
            twin = self.method.network_at(self.client, {**self.received, **weights}).eval().requires_grad_(False)
            known = self._twins[id(weights)] = (weights, twin)
        return known[1]

    def optimizer(self, params: list[nn.Parameter] | list[Tensor]) -> torch.optim.Optimizer:
        """The method's optimiser on other tensors, at this round's rate."""
        method = self.method
        if method.optimizer == "adam":
            return torch.optim.Adam(params, lr=self.lr, weight_decay=method.weight_decay, foreach=False)
        return torch.optim.SGD(
            params, lr=self.lr, momentum=method.momentum, weight_decay=method.weight_decay, foreach=False
        )

    @property
    def planned(self) -> int:
        """The steps of all phases on `data`, where no add-on makes the batches."""
        passes = -(-len(self.data) // self.method.batch)
        return sum(p.epochs * passes if p.steps is None else p.steps for p in self.method.phases)

    def batches(self, data: LabeledImages, phase: Phase, purpose: str) -> Iterator[Batch]:
        """Shuffled (and augmented) batches of a set for one phase; none of an empty set."""
        if not len(data):
            return
        generator, method, device = self.client.generator(purpose), self.method, self.client.device
        for index in shuffled(len(data), method.batch, generator, phase.epochs, phase.steps):
            batch = rows(data, index, device)
            yield batch if method.augment is None else replace(batch, images=method.augment(batch.images, generator))

    def stream(
        self,
        addon: AddOn,
        data: LabeledImages,
        *,
        batch: int | None = None,
        joint: bool = False,
        augment: Augment | None = None,
    ) -> Iterator[Batch]:
        """Batches of an add-on's own set without end: fresh random orders, the last short batch of each kept.

        `batch` is the method's by default; `augment` is applied to each batch.
        """
        generator = self.generator(addon, "stream")
        while True:
            for index in shuffled(len(data), batch or self.method.batch, generator, 1, None):
                part = replace(rows(data, index, self.client.device), joint=joint)
                yield part if augment is None else replace(part, images=augment(part.images, generator))

    def train(self) -> None:
        """Run every phase; `net` then holds the trained weights."""
        streams = {a.key: a.own_batches(self) for a in self.method.addons if fills(a, "own_batches")}
        streams = {name: stream for name, stream in streams.items() if stream is not None}
        slot, kept = self.method.slot("batches"), cast("Tensors", {})
        for number, phase in enumerate(self.method.phases):
            moved = self.trained_parameters(phase)
            optimizer = self.optimizer(list(moved.values()))
            if self.method.optimizer_state == "client":
                resume(optimizer, [f"{number}/{n}" for n in moved], self.memory.get(self.method.moments) or {})
            real = slot.batches(self, self.data, phase) if slot else self.batches(self.data, phase, f"batches{number}")
            self.net.train()
            before = self.steps
            for batch in real:
                self.client.check_running()
                own = {name: next(cast("Iterator[Batch]", stream)) for name, stream in streams.items()}
                Step(self, batch, own, moved).take(optimizer)
                self.steps += 1
            self._phases.append((frozenset(moved), self.steps - before))
            if self.method.optimizer_state == "client":
                kept |= moments(optimizer, [f"{number}/{n}" for n in moved])
        if kept:
            self.memory[self.method.moments] = kept

    def fit(
        self, state: Tensors, owner: AddOn, phase: Phase, term: Callable[[nn.Module], Tensor] | None = None
    ) -> Tensors:
        """Train a second network of this client, from `state`, and return its state.

        The base objective plus `term`, by the method's optimiser on `data`. The add-ons have no part in it and all
        draws are the owner's own, so that the training of `net` is left alone bit by bit. Without images nothing moves.
        """
        if not len(self.data):
            return state
        net = self.method.network_at(self.client, state)
        seed_dropout(net, self.generator(owner, "dropout"))
        moved = [p for n, p in net.named_parameters() if p.requires_grad and phase.trains(n)]
        optimizer, objective = self.optimizer(moved), self.method.objective_of(self.task)
        net.train()
        for batch in self.batches(self.data, phase, owner.key):
            self.client.check_running()
            loss = objective(net(batch.images), batch.labels)
            if term is not None:
                loss = loss + term(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {n: t.detach().clone() for n, t in net.state_dict().items()}

    @cached_property
    def paths(self) -> dict[str, float]:
        """How far a constant unit gradient would have moved each shared parameter; 0 for one that was not trained.

        Same optimiser, steps and damping as in training, no weight decay. SCAFFOLD divides by it: with plain SGD and
        no damping it is steps x lr, with momentum it is more.
        """
        damping = sum(a.damping for a in self.method.addons)
        known: dict[tuple[int, ...], float] = {}
        found: dict[str, float] = {}
        for name in self._shared:
            steps = tuple(count for moved, count in self._phases if name in moved)
            if steps not in known:
                known[steps] = unit_path(self.optimizer, steps, damping)
            found[name] = known[steps]
        return found

    @property
    def path(self) -> float:
        """The one distance in `paths` (FedNova's normaliser times the rate); 0 if no shared parameter was trained.

        Raises:
            ValueError: phases that train different shared parameters have moved them by different distances.
        """
        found = {distance for distance in self.paths.values() if distance > 0}
        if len(found) > 1:
            raise ValueError("the phases move the shared parameters by different distances: there is no single path")
        return max(found, default=0.0)

    @cached_property
    def delta(self) -> Tensors:
        """Trained minus received, for every shared parameter; read it after `train`."""
        return {n: p.detach() - self.start[n] for n, p in self._shared.items()}

    def state(self) -> Tensors:
        """A copy of the trained state: parameters and buffers."""
        return {n: t.detach().clone() for n, t in self.net.state_dict().items()}
