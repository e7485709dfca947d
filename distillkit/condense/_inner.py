"""What gradient matching does around its equations: steps on the pixels, and the inner training of the network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from distillkit import check
from distillkit.condense.distribution import Augmentation, _require_same_place
from distillkit.condense.parameter_gradient import parameter_gradient
from distillkit.condense.state import Progress, Resume, pack_arguments, resumed
from distillkit.networks.base import Network
from distillkit.networks.samplers import uses_batch_statistics


class Descent:
    """SGD with momentum on the pixels, resumable; checks its options and that the loss stays finite."""

    def __init__(
        self,
        images: Tensor,
        lr: float,
        momentum: float,
        steps: int,
        arguments: Mapping[str, Any],
        seed: int,
        resume: Resume | None,
    ) -> None:
        self.lr = check.real_number(lr, "lr", above=0.0)
        self.momentum = check.real_number(momentum, "momentum", least=0.0)
        if momentum >= 1:
            raise ValueError(f"momentum must be below 1, got {momentum:g}")
        arguments = {**arguments, "lr": lr, "momentum": momentum, "shape": list(images.shape)}
        arguments["dtype"] = str(images.dtype)
        self.images, self.velocity = images, torch.zeros_like(images)
        self.steps, self.done, self.seed = steps, 0, seed
        self._arguments = pack_arguments(arguments)
        state = resumed(resume, arguments, steps)
        if state is not None:
            self.images, self.velocity = (state[name].to(images).clone() for name in ("images", "velocity"))
            self.done, self.seed = int(state["step"]), int(state["seed"])

    def descend(self, loss: Tensor, gradient: Tensor) -> float:
        """Move the images down `gradient`; return the loss, which must be finite."""
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} in step {self.done + 1}: matching diverged; lower lr")
        self.velocity.mul_(self.momentum).add_(gradient)
        self.images.add_(self.velocity, alpha=-self.lr)
        return value

    def report(self, callback: Callable[[Progress], object] | None, loss: float) -> None:
        """Count a step and tell the caller."""
        self.done += 1
        if callback is not None:
            live = {"images": self.images, "velocity": self.velocity, "step": torch.tensor(self.done)}
            live |= {"seed": torch.tensor(self.seed), "arguments": self._arguments}
            callback(Progress(self.done, self.steps, loss, self.images, live))


def trainable(network: Network, images: Tensor) -> tuple[Network, list[nn.Parameter], list[nn.Module]]:
    """A copy of a drawn network to be trained, its parameters, and its batch norms that use batch statistics."""
    _require_same_place(network, images)
    twin = copy.deepcopy(cast(nn.Module, network)).requires_grad_(True)
    norms = [m for m in twin.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and uses_batch_statistics(m)]
    return cast(Network, twin), list(twin.parameters()), list(norms)


@torch.no_grad()
def fix_statistics(network: Network, norms: Sequence[nn.Module], images: Tensor) -> None:
    """Put `norms` in eval mode with the statistics of `images` as their running ones."""
    for norm in norms:
        cast(nn.BatchNorm2d, norm).reset_running_stats()
        cast(nn.BatchNorm2d, norm).momentum = None  # a cumulative average: of one batch, that batch
        norm.train()
    network(images)
    for norm in norms:
        norm.eval()


def train(
    network: Network,
    parameters: Sequence[nn.Parameter],
    norms: Sequence[nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    lr: float,
    batch: int,
    augment: Augmentation | None,
    generator: torch.Generator,
    chunk: int | None,
) -> None:
    """Train `network` in place by plain SGD on the cross-entropy; `norms` use the statistics of each batch."""
    for norm in norms:
        norm.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for index in order.split(batch):
            seen = images.index_select(0, index)
            if augment is not None:
                seen = augment(seen, generator, siamese=False)
            gradient = parameter_gradient(network, parameters, seen, labels.index_select(0, index), chunk=chunk)
            with torch.no_grad():
                for parameter, g in zip(parameters, gradient, strict=True):
                    parameter.sub_(g, alpha=lr)


def matched(
    network: nn.Module, target: Mapping[str, Tensor] | Sequence[Tensor]
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters to match and a target for each, which fits it."""
    named = dict(network.named_parameters())
    if not len(target):
        raise ValueError("target must hold at least one tensor, got none")
    if not isinstance(target, Mapping):
        target = list(target)
        if len(target) != len(named):
            raise ValueError(f"target must hold a tensor for each of the {len(named)} parameters, got {len(target)}")
        target = dict(zip(named, target))
    if unknown := sorted(set(target) - set(named)):
        raise ValueError(f"target has entries that are no parameters of the network: {', '.join(unknown)}")
    targets = []
    for name, value in target.items():
        if not isinstance(value, Tensor) or value.shape != named[name].shape:
            came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"target for {name} must be a tensor {list(named[name].shape)}, got {came}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"target for {name} must be finite")
        targets.append(value.detach().to(named[name]))
    return [named[name] for name in target], targets
