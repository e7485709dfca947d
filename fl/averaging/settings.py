"""What a weight-averaging method is set to: its options, checked, and what follows from them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit._sanity_checks import warn
from distillkit._utils import check
from distillkit.augment._validation import Augment
from fl._components import Component
from fl.averaging._entries import Entries
from fl.batches import Phase
from fl.message import Entry, Tensors
from fl.networks import Networks
from fl.task import LabelTask

__all__ = ["Objective", "Settings", "learning_rate"]

Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """The options of a `FedAvg`, checked, as its add-ons read them: `local.settings.batch`, `server.settings.weights`.

    Attributes:
        networks: who has which architecture.
        lr, momentum, weight_decay, optimizer, optimizer_state, lr_decay: the clients' optimiser, see `FedAvg`; `rate`
            and `optimizer_for` put them together.
        phases: the parts of a local training; `epochs` and `steps` become one.
        batch, augment, objective: what a step reads and how it is judged, see `FedAvg`.
        weights, max_samples: a reply's weight in the mean, and the largest that one may claim.
        buffers, personal: what stays with a client; `kept_by_client` and `sent_buffers` say it of a network.
        predict: which outputs a test looks at: the "real" classes, or "all".
        first_outputs: index of each add-on's first extra output behind the task's classes, by its key.
        layers: names of the inner modules whose outputs add-ons read.
        damping: how strongly add-ons pull the weights to the start of the round, together.
        tried: what was found out about the networks in a trial, for the next one.
    """

    networks: Networks
    lr: float | None
    momentum: float
    weight_decay: float
    optimizer: Literal["sgd", "adam"]
    optimizer_state: Literal["round", "client"]
    lr_decay: float
    phases: tuple[Phase, ...]
    batch: int
    augment: Augment | None
    objective: Objective | None
    weights: Literal["samples", "uniform"]
    max_samples: float
    buffers: Literal["mean", "local", "drop"]
    personal: tuple[str, ...]
    predict: Literal["real", "all"]
    first_outputs: Mapping[str, int]
    layers: tuple[str, ...]
    damping: float
    tried: dict[tuple[object, ...], str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check.real_number(self.momentum, "momentum", least=0.0, below=1.0)
        check.real_number(self.weight_decay, "weight_decay", least=0.0)
        check.real_number(self.lr_decay, "lr_decay", above=0.0)
        check.one_of(self.optimizer, "optimizer", ("sgd", "adam"))
        default = 0.1 if self.optimizer == "sgd" else 0.001
        object.__setattr__(self, "lr", default if self.lr is None else learning_rate(self.lr, "lr"))
        check.one_of(self.optimizer_state, "optimizer_state", ("round", "client"))
        if self.optimizer_state == "client" and self.optimizer == "sgd" and not self.momentum:
            raise ValueError("optimizer_state='client' keeps momentum, but momentum is 0: give one, or leave it out")
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(
                f"momentum is SGD's, and Adam has averages of its own: with optimizer='adam' give momentum=0, "
                f"got momentum={self.momentum:g}"
            )
        check.positive_int(self.batch, "batch")
        if self.augment is not None:
            check.callable_with(self.augment, "augment", ["images", "generator"], "`distillkit.augment.DSA()`, say")
        if self.objective is not None:
            example = "`torch.nn.CrossEntropyLoss()`, say"
            check.callable_with(self.objective, "objective", ["logits", "labels"], example)
        check.one_of(self.weights, "weights", ("samples", "uniform"))
        check.real_number(self.max_samples, "max_samples", above=0.0)
        check.one_of(self.buffers, "buffers", ("mean", "local", "drop"))
        check.one_of(self.predict, "predict", ("real", "all"))

    # The optimiser.

    def rate(self, round_number: int) -> float:
        """The clients' learning rate in round `round_number`, from 1: lr * lr_decay ** (round_number - 1)."""
        assert self.lr is not None
        return self.lr * self.lr_decay ** (round_number - 1)

    def optimizer_for(self, params: Sequence[Tensor], rate: float) -> torch.optim.Optimizer:
        """A new optimiser of the clients' kind, without momentum yet, on tensors `params`, at learning rate `rate`."""
        held: list[Any] = list(params)
        if self.optimizer == "adam":
            return torch.optim.Adam(held, lr=rate, weight_decay=self.weight_decay, foreach=False)
        return torch.optim.SGD(held, lr=rate, momentum=self.momentum, weight_decay=self.weight_decay, foreach=False)

    def objective_of(self, task: LabelTask) -> Objective:
        """The objective that a step trains with: the one that was given, or the loss of the `task`."""
        return self.objective or task.loss

    # What is shared, and what stays with a client.

    def is_personal(self, name: str) -> bool:
        """Whether the parameter called `name` stays with its client: whether a pattern of `personal` matches it."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.personal)

    def kept_by_client(self, network: nn.Module) -> set[str]:
        """Names of the parameters and buffers of `network` that stay with the client and are never sent."""
        kept = {n for n, _ in network.named_parameters() if self.is_personal(n)}
        return kept | (set(floating_buffers(network)) if self.buffers == "local" else set())

    def sent_buffers(self, network: nn.Module) -> list[tuple[Entry[Tensors], list[str]]]:
        """Which buffers of `network` travel back, by entry: floats for the mean, integers for the maximum."""
        if self.buffers == "drop":
            return []
        floating = floating_buffers(network) if self.buffers == "mean" else []
        integer = [n for n, b in _state_buffers(network).items() if not b.is_floating_point()]
        return [(e, names) for e, names in ((Entries.buffers, floating), (Entries.counters, integer)) if names]

    def first_output(self, addon: Component, classes: int) -> int:
        """The index of the first extra output of `addon` in a network for so many `classes`."""
        return classes + self.first_outputs[addon.key]

    def tested_outputs(self, classes: int) -> int | None:
        """How many outputs a test looks at: the `classes` of the task, or None for all."""
        return classes if self.predict == "real" else None


def floating_buffers(network: nn.Module) -> list[str]:
    """Names of the buffers of `network` that have a mean: batch-norm statistics, but not their counters."""
    return [n for n, b in _state_buffers(network).items() if b.is_floating_point()]


def _state_buffers(network: nn.Module) -> Tensors:
    """The buffers of `network` that are part of its state, by name: all but those made with `persistent=False`."""
    buffers = dict(network.named_buffers())
    held = network.state_dict() if buffers else {}
    return {n: b for n, b in buffers.items() if n in held}


def learning_rate(value: float, name: str) -> float:
    """Return a rate at which networks are trained, if it is positive; one far beyond all custom is warned of.

    Args:
        value: as it was given.
        name: of the argument, for the message.

    Raises:
        TypeError, ValueError: no number, or not above 0.
    """
    rate = check.real_number(value, name, above=0.0)
    if rate > 10:
        warn(f"{name}={rate:g} is far beyond the rates that train networks (0.001 to 1)")
    return rate
