"""Checked options of a `FedAvg`, and values derived from them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.options import Decay, Positive, PositiveInt, check_options
from distillkit._utils.user_warnings import warn
from distillkit.augment._validation import Augment
from fl.averaging._entries import Entries
from fl.averaging.optimizer import ClientOptimizer
from fl.batches import Phase
from fl.message import Entry, Tensors
from fl.networks import Networks
from fl.task import LabelTask

Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """Checked options of a `FedAvg`. Add-ons read them as `local.settings` and `server.settings`.

    Attributes:
        networks: the architectures, and their assignment to clients.
        lr, momentum, optimizer: options of the clients' optimizer, see `FedAvg`.
        phases: phases of local training. The options `epochs` and `steps` of `FedAvg` are stored as a single phase.
        batch, augment, objective: options for a step's batches and loss, see `FedAvg`.
        weights: weight of a client's reply in the mean: its number of images ("samples"), or 1 ("uniform").
        max_samples: largest number of images that a client may claim as its weight.
        max_update_norm: largest permitted l2 norm of a client's update. None: `update_limit` computes it from the norm
            of the network's weights.
        buffers, personal: options that determine which buffers and parameters stay with a client, see `FedAvg`.
        predict: outputs that a test uses for predictions: those of the task's classes ("real"), or "all".
        first_outputs: index of the first additional output of each add-on, by add-on key. Index 0 is the first output
            after those of the task's classes.
        layers: names of the inner modules whose outputs add-ons read.
        damping: sum of the coefficients mu of all add-ons that pull the weights towards their values at the start of
            the round, see `AddOn.damping`.
    """

    networks: Networks
    lr: float | None
    momentum: Decay
    optimizer: ClientOptimizer
    phases: tuple[Phase, ...]
    batch: PositiveInt
    augment: Augment | None
    objective: Objective | None
    weights: Literal["samples", "uniform"]
    max_samples: Positive
    max_update_norm: Positive | None
    buffers: Literal["mean", "local", "drop"]
    personal: tuple[str, ...]
    predict: Literal["real", "all"]
    first_outputs: Mapping[str, int]
    layers: tuple[str, ...]
    damping: float

    def __post_init__(self) -> None:
        check_options(self)
        default = 0.1 if self.optimizer.name == "sgd" else 0.001
        object.__setattr__(self, "lr", default if self.lr is None else learning_rate(self.lr, "lr"))
        if self.optimizer.state == "client" and self.optimizer.name == "sgd" and not self.momentum:
            raise ValueError(
                "ClientOptimizer(state='client') keeps momentum between rounds, but momentum is 0: set momentum, or "
                "leave out state"
            )
        if self.optimizer.name == "adam" and self.momentum:
            raise ValueError(
                "momentum belongs to SGD; Adam has its own averages. With optimizer='adam' give momentum=0, "
                f"got momentum={self.momentum:g}"
            )
        if self.augment is not None:
            check.callable_with(self.augment, "augment", ["images", "generator"], "`distillkit.augment.DSA()`, say")
        if self.objective is not None:
            example = "`torch.nn.CrossEntropyLoss()`, say"
            check.callable_with(self.objective, "objective", ["logits", "labels"], example)

    # The optimizer.

    def rate(self, round_number: int) -> float:
        """Return the clients' learning rate in round `round_number` >= 1: lr * lr_decay ** (round_number - 1)."""
        assert self.lr is not None
        return self.lr * self.optimizer.lr_decay ** (round_number - 1)

    def update_limit(self, weights: Tensors) -> float:
        """Return the largest l2 norm of an update: `max_update_norm` or, by default, 100 times (1 + the norm of the
        weights).

        Args:
            weights: the shared weights at the start of the round, by name.
        """
        if self.max_update_norm is not None:
            return self.max_update_norm
        return 100 * (1 + math.hypot(*(float(torch.linalg.vector_norm(w)) for w in weights.values())))

    def objective_of(self, task: LabelTask) -> Objective:
        """Return the loss of local training: the option `objective`, or the loss of the `task`."""
        return self.objective or task.loss

    # Parameters and buffers that are shared, or stay with a client.

    def is_personal(self, name: str) -> bool:
        """Return whether the parameter called `name` stays with its client (option `personal`)."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.personal)

    def kept_by_client(self, network: nn.Module) -> set[str]:
        """Return the names of the parameters and buffers of `network` that stay with the client and are never sent."""
        kept = {n for n, _ in network.named_parameters() if self.is_personal(n)}
        return kept | (set(floating_buffers(network)) if self.buffers == "local" else set())

    def sent_buffers(self, network: nn.Module) -> list[tuple[Entry[Tensors], list[str]]]:
        """Return the names of the buffers of `network` that clients send, one list for each message entry."""
        if self.buffers == "drop":
            return []
        floating = floating_buffers(network) if self.buffers == "mean" else []
        integer = [n for n, b in _state_buffers(network).items() if not b.is_floating_point()]
        return [(e, names) for e, names in ((Entries.buffers, floating), (Entries.counters, integer)) if names]

    def tested_outputs(self, classes: int) -> int | None:
        """Return the number of outputs that a test uses for predictions: `classes`, or None for all outputs."""
        return classes if self.predict == "real" else None


def variances(network: nn.Module) -> set[str]:
    """Return the names of the buffers of `network` that hold running variances, which are never negative."""
    norms = {name: m for name, m in network.named_modules() if isinstance(getattr(m, "running_var", None), Tensor)}
    return {f"{name}.running_var" if name else "running_var" for name in norms}


def floating_buffers(network: nn.Module) -> list[str]:
    """Return the names of the float buffers of `network`, such as the running statistics of batch norm."""
    return [n for n, b in _state_buffers(network).items() if b.is_floating_point()]


def _state_buffers(network: nn.Module) -> Tensors:
    """Return the buffers in the state dict of `network`, by name."""
    buffers = dict(network.named_buffers())
    stored = network.state_dict() if buffers else {}
    return {n: b for n, b in buffers.items() if n in stored}


def learning_rate(value: float, name: str) -> float:
    """Check that a learning rate is positive, warn if it is far above the usual range, and return it.

    Args:
        value: the learning rate.
        name: name of the argument, for messages.

    Raises:
        TypeError, ValueError: `value` is not a number above 0, or is too large for float32.
    """
    rate = check.learning_rate(value, name)
    if rate > 10:
        warn(f"{name}={rate:g} is far above the usual learning rates (0.001 to 1)")
    return rate


def as_phases(epochs: int | None, steps: int | None, phases: Sequence[Phase] | None) -> tuple[Phase, ...]:
    """Return the phases of local training that the options `epochs`, `steps` or `phases` of `FedAvg` describe.

    If all three are None, the result is one phase of one epoch.

    Raises:
        TypeError: `phases` is empty or contains anything other than phases.
        ValueError: more than one of `epochs`, `steps` and `phases` is given.
    """
    if phases is None:
        if epochs is not None and steps is not None:
            raise ValueError(f"give epochs or steps, not both: got epochs={epochs}, steps={steps}")
        return (Phase(1 if epochs is None else epochs, steps),)
    if epochs is not None or steps is not None:
        raise ValueError(
            f"give epochs or steps, or phases that have their own, not both: got epochs={epochs}, steps={steps} beside "
            "phases"
        )
    given = tuple(phases) if isinstance(phases, Sequence) else (phases,)
    wrong = [type(p).__name__ for p in given if not isinstance(p, Phase)]
    if wrong or not given:
        raise TypeError(f"phases must be a list of `fl.Phase` objects, got {wrong[0] if wrong else 'an empty one'}")
    return given


def as_patterns(personal: str | Sequence[str]) -> tuple[str, ...]:
    """Return the option `personal` (one pattern, several, or none) as a tuple of patterns.

    Raises:
        TypeError: a pattern is not a string.
    """
    given = (personal,) if isinstance(personal, str) else tuple(personal) if isinstance(personal, Sequence) else (None,)
    if not all(isinstance(p, str) for p in given):
        raise TypeError(f"personal must be patterns of parameter names, as 'classifier.*', got {personal!r}")
    return tuple(p for p in given if p is not None)
