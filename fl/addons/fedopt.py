"""Optimizers of the server: momentum (FedAvgM) and adaptive steps (FedAdagrad, FedAdam and FedYogi)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils.options import Decay, LearningRate, NonNegative, Positive
from fl.averaging import AddOn, AveragingServer
from fl.message import Entry, Tensors


@dataclass(frozen=True)
class FedAvgM(AddOn):
    """FedAvgM (Hsu et al., "Measuring the effects of non-identical data distribution", 2019, section 4.3).

    The server applies momentum over the rounds. From the mean Delta of the clients' changes in a round, it computes the
    momentum v <- beta v + Delta and the weights w <- w + lr v. With momentum 0, lr is a plain server step size (such as
    SCAFFOLD's eta_g). With momentum 0 and lr 1, the add-on is disabled. Buffers are set to their mean over the clients.
    With several architectures, those that no client of a round uses keep their weights and v.

    Args:
        momentum: beta, the momentum, in [0, 1).
        lr: eta, the server's step size, above 0. The paper's text has no step size, that is, lr = 1.
        rule: formula of the step. "heavy-ball" is the formula above, from the paper. "nesterov", from the paper's
            experiments, is w <- w + lr (Delta + beta v). "fedcog", from the baseline in FedCOG's code, divides the step
            lr v by 1 + beta from the second round on.
    """

    momentum: Decay = 0.9
    lr: LearningRate = 1.0
    rule: Literal["heavy-ball", "nesterov", "fedcog"] = "heavy-ball"
    data_access = "none"
    velocity = Entry[Tensors]("first")

    @property
    def disabled(self) -> bool:
        """True if the add-on has no effect: with momentum 0 and lr 1, the server adds the clients' mean weight change,
        as without the add-on.
        """
        return self.momentum == 0 and self.lr == 1

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """Update the momentum v with `mean`, the clients' mean weight change, and return the server's change of the
        weights.

        The formula for this change depends on the option `rule`; see the class.
        """
        known: Tensors = server.state.get(self.velocity, {})
        v = {n: self.momentum * known[n] + delta if n in known else delta for n, delta in mean.items()}
        server.state[self.velocity] = {**known, **v}
        if self.rule == "nesterov":
            return {n: self.lr * (delta + self.momentum * v[n]) for n, delta in mean.items()}
        scale = self.lr / (1 + self.momentum) if self.rule == "fedcog" and known else self.lr
        return {n: scale * v[n] for n in mean}


@dataclass(frozen=True, kw_only=True)
class ServerAdaptive(AddOn, ABC):
    """Base class of `FedAdagrad`, `FedAdam` and `FedYogi` (Reddi et al., "Adaptive federated optimization", ICLR 2021).

    The class implements Algorithm 2. Let w be the global weights, and Delta the mean of the clients' weight changes in
    a round. In each round, the server computes, element by element:

        m <- beta1 m + (1 - beta1) Delta,    v <- (see the subclass),    w <- w + lr m / (sqrt(v) + tau)

    A subclass defines the update of v (`second`). There is no bias correction. m starts at 0 and v at `initial`.
    Buffers are set to their mean over the clients. With several architectures, those that no client of a round uses
    keep their weights, m and v.

    Args:
        lr: eta, the server's step size. A weight changes by about this much in a round. The paper tunes it over 10^-3
            ... 10 together with the clients' learning rate.
        beta1: decay of m, in [0, 1).
        tau: constant in the denominator, above 0. Smaller values make the step more adaptive. The paper mostly uses
            10^-3.
        initial: value of v before the first round, at least 0. None: tau^2, the smallest value that the paper allows.
            Some libraries use 0.
    """

    lr: LearningRate = 0.01
    beta1: Decay = 0.9
    tau: Positive = 1e-3
    initial: NonNegative | None = None
    data_access = "none"
    m = Entry[Tensors]("first")
    v = Entry[Tensors]("first")

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new second moment v of the clients' mean weight change, element by element.

        Args:
            v: second moment before this round.
            square: square of this round's mean weight change.
        """

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """Update the moments m and v with `mean`, the clients' mean weight change, and return the step of the weights.

        The step is lr m / (sqrt(v) + tau), where lr and tau are options of the class.
        """
        m: Tensors = server.state.get(self.m, {})
        v: Tensors = server.state.get(self.v, {})
        m, v = dict(m), dict(v)
        initial = self.tau**2 if self.initial is None else self.initial
        for name, delta in mean.items():
            m[name] = self.beta1 * m.get(name, torch.zeros_like(delta)) + (1 - self.beta1) * delta
            v[name] = self.second(v.get(name, torch.full_like(delta, initial)), delta.square())
        server.state[self.m], server.state[self.v] = m, v
        return {n: self.lr * m[n] / (v[n].sqrt() + self.tau) for n in mean}


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(ServerAdaptive):
    """FedAdagrad: an adaptive step on the server, with the second moment v <- v + Delta^2.

    Delta is the mean of the clients' weight changes in a round; see `ServerAdaptive` for the step and the arguments.
    The default of `beta1` is 0, because FedAdagrad has no momentum in the paper (Reddi et al., ICLR 2021).
    """

    beta1: Decay = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v + square: the second moment v plus `square`, the square of the clients' mean weight change."""
        return v + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(ServerAdaptive):
    """FedAdam: an adaptive step on the server, with the second moment v <- beta2 v + (1 - beta2) Delta^2.

    Delta is the mean of the clients' weight changes in a round; see `ServerAdaptive` for the step and the other
    arguments.

    Args:
        beta2: decay of v, in [0, 1).
    """

    beta2: Decay = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return beta2 v + (1 - beta2) square, where v is the second moment and beta2 is the option `beta2`.

        `square` is the square of the clients' mean weight change.
        """
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """FedYogi: adaptive server step with the second moment v <- v - (1 - beta2) Delta^2 sign(v - Delta^2).

    Delta is the mean of the clients' weight changes in a round; see `ServerAdaptive` for the step. The arguments are
    those of `FedAdam`.

    v moves towards Delta^2 by (1 - beta2) Delta^2. After rounds with a large Delta, a few rounds with a small Delta
    therefore reduce v only slightly.
    """

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v - (1 - beta2) square sign(v - square): the second moment v, moved towards `square`.

        `square` is the square of the clients' mean weight change, and beta2 is the option `beta2`.
        """
        return v - (1 - self.beta2) * square * torch.sign(v - square)
