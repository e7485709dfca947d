"""FedSAM: sharpness-aware minimisation on the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fl._options import NonNegative
from fl.averaging import AddOn, Step
from fl.averaging.step import restored
from fl.message import Tensors

__all__ = ["FedSAM"]


@dataclass(frozen=True)
class FedSAM(AddOn):
    """FedSAM (Qu et al., "Generalized federated learning via sharpness aware minimization", ICML 2022, Algorithm 1).

    Clients look for flat minima: they minimise the loss at the worst point nearby, and not at their weights.

    Each local gradient is taken at w + rho g / ||g||, g being the gradient at w of the same batch and the norm that of
    all parameters in training together. The whole local loss is meant, every add-on's term and batch included; a
    correction such as SCAFFOLD's comes after it.

    Both passes see the same images and draw the same dropout masks; the weights come back from a copy, bit by bit; and
    batch-norm statistics move once, in the pass at w. (The paper is silent on these; plain implementations of SAM let
    the statistics move twice.) With a zero gradient there is no direction, and the weights stay. A step costs two.

    Args:
        rho: radius of the perturbation, at least 0; with 0 it is not installed.
    """

    key = "SAM"
    disabled_at_zero = ("rho",)
    rho: NonNegative = 0.05
    data_access = "none"

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """The gradient at w + rho g / ||g||, in place of the gradient g at w. The weights come back as they were."""
        local = step.local
        masks = local.dropout.get_state()
        grads = compute()
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        reach = torch.where(norm > 0, self.rho / norm, 0.0)
        with restored((*step.trained.values(), *local.net.buffers())):
            with torch.no_grad():
                for name, param in step.trained.items():
                    param.add_(grads[name] * reach)
            local.dropout.set_state(masks)
            return compute()
