"""Optimizers of `distillkit.training`.

`torch.optim` is not used, because its first use imports PyTorch's compiler, which costs time and memory.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

__all__ = ["OPTIMIZERS", "SGD", "AdamW", "OptimizerOptions"]


class OptimizerOptions(Protocol):
    """Training options that the optimizers in this module need."""

    @property
    def momentum(self) -> float:
        """Momentum of SGD."""

    @property
    def weight_decay(self) -> float:
        """Weight decay."""


class SGD:
    """SGD with momentum and weight decay on all parameters, as in `torch.optim.SGD`.

    Args:
        network: the network whose trainable parameters are updated.
        options: training protocol, of which the attributes `momentum` and `weight_decay` are used.
    """

    def __init__(self, network: nn.Module, options: OptimizerOptions) -> None:
        self.parameters, self.options = [p for p in network.parameters() if p.requires_grad], options
        self.reset()

    def reset(self) -> None:
        """Set the momentum to zero."""
        self.velocity = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters."""
        for parameter, moving in zip(self.parameters, self.velocity, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.add(parameter, alpha=self.options.weight_decay)
                parameter.sub_(moving.mul_(self.options.momentum).add_(gradient), alpha=lr)


class AdamW:
    """AdamW with betas 0.9 and 0.999, as in `torch.optim.AdamW`. Parameters with one dimension have no weight decay.

    Biases and the scales of norm layers are therefore not decayed, as in the code of SRe2L and RDED.

    Args:
        network: the network whose trainable parameters are updated.
        options: training protocol, of which the attribute `weight_decay` is used.
    """

    betas, epsilon = (0.9, 0.999), 1e-8

    def __init__(self, network: nn.Module, options: OptimizerOptions) -> None:
        self.parameters, self.options = [p for p in network.parameters() if p.requires_grad], options
        self.reset()

    def reset(self) -> None:
        """Set the moments to zero."""
        self.steps = 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters."""
        self.steps += 1
        b1, b2 = self.betas
        first, second = 1 - b1**self.steps, math.sqrt(1 - b2**self.steps)
        for parameter, (mean, square) in zip(self.parameters, self.moments, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                if parameter.ndim > 1:
                    parameter.mul_(1 - lr * self.options.weight_decay)
                mean.lerp_(gradient, 1 - b1)
                square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
                parameter.addcdiv_(mean, (square.sqrt() / second).add_(self.epsilon), value=-lr / first)


OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}
