"""Steps of `torch.optim`, by its functional interface.

The classes of `torch.optim` are not used: the first object of such a class imports PyTorch's compiler, which costs two
seconds and 150 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd


@torch.no_grad()
def sgd_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> None:
    """Take a step of `torch.optim.SGD` in place, from velocities that are zero before the first step."""
    sgd(
        list(parameters), list(gradients), list(velocities), lr=lr, momentum=momentum, weight_decay=weight_decay,
        dampening=0.0, nesterov=False, maximize=False,
    )  # fmt: skip


class SGD:
    """`torch.optim.SGD` on all trainable parameters of a network."""

    def __init__(self, network: nn.Module, momentum: float, weight_decay: float) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.momentum, self.weight_decay = momentum, weight_decay
        self.reset()

    def reset(self) -> None:
        """Set the momentum to zero."""
        self.velocities = [torch.zeros_like(p) for p in self.parameters]

    def step(self, lr: float) -> None:
        """Update the parameters that have a gradient."""
        used = [(p, p.grad, v) for p, v in zip(self.parameters, self.velocities, strict=True) if p.grad is not None]
        if used:
            sgd_step(*zip(*used, strict=True), lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


class AdamW:
    """`torch.optim.AdamW` with betas 0.9 and 0.999. Parameters with one dimension have no weight decay.

    Biases and the scales of norm layers are therefore not decayed, as in the code of SRe2L and RDED.
    """

    def __init__(self, network: nn.Module, momentum: float, weight_decay: float) -> None:
        self.parameters, self.weight_decay = [p for p in network.parameters() if p.requires_grad], weight_decay
        self.reset()

    def reset(self) -> None:
        """Set the moments to zero."""
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters that have a gradient."""
        for decay, decayed in ((self.weight_decay, True), (0.0, False)):
            pairs = zip(self.parameters, self.moments, strict=True)
            used = [(p, p.grad, *own) for p, own in pairs if p.grad is not None and (p.ndim > 1) == decayed]
            if used:
                parameters, gradients, means, squares, counts = (list(tensors) for tensors in zip(*used, strict=True))
                adamw(
                    parameters, gradients, means, squares, [], counts, lr=lr, weight_decay=decay,
                    beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=False, maximize=False,
                )  # fmt: skip


OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}
