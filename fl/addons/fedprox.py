"""FedProx: a proximal term in the local objective, which pulls the weights towards the received weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from distillkit._utils.options import NonNegative
from distillkit.losses import proximal
from fl.averaging import AddOn, Step


@dataclass(frozen=True)
class FedProx(AddOn):
    """FedProx (Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2).

    A proximal term keeps every client near the weights that it received, even if its data differ from those of other
    clients. FedProx adds (mu / 2) ||w - w_t||^2 to the local objective F_k, where w are the shared parameters and w_t
    their received values; the sum is the paper's h_k. Buffers are not part of the term. The paper's gamma, which states
    how inexactly a client solves its local problem, is not an option: `epochs` or `steps` of `FedAvg` set the local
    work.

    Args:
        mu: weight of the proximal term, at least 0; 0 disables the add-on. The paper tunes over {0.001, 0.01, 0.1, 1}.
    """

    disabled_at_zero = ("mu",)
    mu: NonNegative = 0.01
    data_access = "none"

    @property
    def damping(self) -> float:  # type: ignore[override]
        """Weight mu of the proximal term, which pulls the weights towards their values at the start of the round."""
        return self.mu

    def loss(self, step: Step) -> Tensor:
        """Return the proximal term (mu / 2) ||w - w_t||^2 of the local objective.

        mu is an option, w are the current values of the shared parameters, and w_t their received values.
        """
        local = step.local
        return proximal(local.shared_parameters().values(), local.start.values(), self.mu)
