"""FedSAM: sharpness-aware minimization on the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distillkit._utils.options import NonNegative
from fl.averaging import AddOn, Step
from fl.averaging.step import restored
from fl.message import Tensors


@dataclass(frozen=True)
class FedSAM(AddOn):
    """FedSAM (Qu et al., "Generalized federated learning via sharpness aware minimization", ICML 2022, Algorithm 1).

    Clients look for flat minima: they minimize the largest loss near their weights instead of the loss at their
    weights. Each local gradient is computed at w + rho g / ||g||, where g is the gradient of the same batch at w, and
    ||g|| is the norm over all trained parameters together. The loss includes the terms of all add-ons. Corrections such
    as SCAFFOLD's are applied to the resulting gradient.

    Each step computes two gradients, with the same images and dropout masks. Batch-norm statistics are updated once, in
    the forward pass at w; plain implementations of SAM update them twice. The paper does not specify these details. If
    g is zero, the weights are not perturbed.

    Args:
        rho: radius of the perturbation, at least 0; 0 disables the add-on.
    """

    disabled_at_zero = ("rho",)
    rho: NonNegative = 0.05
    data_access = "none"

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Return the gradient at the perturbed weights w + rho g / ||g||.

        g is the gradient at the current weights w, and rho is an option. `compute` returns the gradient at the weights
        that the network has when it is called.
        """
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
