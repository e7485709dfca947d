"""FedAvgM: momentum on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distillkit._utils.options import Decay, Positive
from fl.averaging import AddOn, AveragingServer
from fl.message import Entry, Tensors

__all__ = ["FedAvgM"]


@dataclass(frozen=True)
class FedAvgM(AddOn):
    """FedAvgM (Hsu et al., "Measuring the effects of non-identical data distribution", 2019, section 4.3).

    The server moves with momentum over the rounds. With the mean change Delta of a round: v <- beta v + Delta, w <- w +
    lr v. With momentum 0 it is a plain server step size (such as SCAFFOLD's eta_g); with momentum 0 and lr 1 it is
    disabled. Buffers have no momentum. A tensor that no drawn client has (another architecture) stays unchanged, v
    included.

    Args:
        momentum: beta, the momentum, in [0, 1).
        lr: eta, the server's step size, above 0; the paper's text has no step size, which is lr 1.
        rule: formula of the step. "heavy-ball" is the formula of the paper. "nesterov" is used in its experiments: w <-
            w + lr (Delta + beta v). "fedcog" is the baseline in FedCOG's code: v as above, but from the second round
            on the step is v / (1 + beta).
    """

    key = "ServerMomentum"
    momentum: Decay = 0.9
    lr: Positive = 1.0
    rule: Literal["heavy-ball", "nesterov", "fedcog"] = "heavy-ball"
    data_access = "none"
    velocity = Entry[Tensors]("first")

    @property
    def disabled(self) -> bool:
        """Whether the step is the plain mean change (momentum 0, lr 1)."""
        return self.momentum == 0 and self.lr == 1

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """Move v by the mean change, and the model by lr v (or as `rule` says)."""
        known: Tensors = server.state.get(self.velocity, {})
        v = {n: self.momentum * known[n] + delta if n in known else delta for n, delta in mean.items()}
        server.state[self.velocity] = {**known, **v}
        if self.rule == "nesterov":
            return {n: self.lr * (delta + self.momentum * v[n]) for n, delta in mean.items()}
        scale = self.lr / (1 + self.momentum) if self.rule == "fedcog" and known else self.lr
        return {n: scale * v[n] for n in mean}
