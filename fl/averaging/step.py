"""The order of one local step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distillkit.networks.base import Network, SplitNetwork
from fl.averaging.addon import AddOn
from fl.batches import Batch
from fl.message import Tensors

if TYPE_CHECKING:
    from fl.averaging.local import Local

__all__ = ["Output", "Step", "outputs"]


@dataclass(frozen=True)
class Output:
    """What the network says of a batch: embedding [B, d], logits [B, K'], and of inner layers, name -> [B, m]."""

    embedding: Tensor
    logits: Tensor
    inner: Mapping[str, Tensor] = field(default_factory=dict)


def outputs(network: Network, images: Tensor, layers: Mapping[str, nn.Module] | None = None) -> Output:
    """One forward pass, in which every layer runs once; what the modules in `layers` give is noted, flattened.

    Raises:
        ValueError: a module in `layers` that did not run exactly once, or whose output has no row for each image.
    """
    found: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if name in found or not isinstance(output, Tensor) or output.ndim < 2 or len(output) != len(images):
            raise ValueError(
                f"layer {name!r} must run once in a forward pass and give a tensor with a row for each image"
            )
        found[name] = output.flatten(1).clone()  # what follows may work in place

    with ExitStack() as hooks:
        for name, module in (layers or {}).items():
            hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        if isinstance(network, SplitNetwork):
            embedding, logits = network.outputs(images)
        else:
            embedding = network.features(images)
            logits = network.classifier(embedding)
    if missing := [name for name in layers or {} if name not in found]:
        raise ValueError(f"layer {missing[0]!r} did not run in a forward pass of the network")
    return Output(embedding, logits, found)


class Step:
    """One optimiser step: forward, loss, gradient, correction, optimiser, after."""

    def __init__(self, local: Local, batch: Batch, own: Mapping[str, Batch], moved: Mapping[str, nn.Parameter]) -> None:
        self.local, self.batch, self.own, self.trained = local, batch, own, moved
        self._outputs: dict[str, Output] = {}

    def output(self, addon: AddOn | None = None) -> Output:
        """What the network says of the real batch, or of an add-on's own batch."""
        return self._outputs["" if addon is None else addon.key]

    def batch_of(self, addon: AddOn) -> Batch:
        """The add-on's own batch of this step."""
        return self.own[addon.key]

    def _forward(self) -> None:
        run = partial(outputs, self.local.network, layers=self.local.layers)
        joint = [name for name, batch in self.own.items() if batch.joint]
        parts = [self.batch.images, *(self.own[name].images for name in joint)]
        together = run(torch.cat(parts) if joint else self.batch.images)
        sizes = [len(part) for part in parts]
        inner = {layer: values.split(sizes) for layer, values in together.inner.items()}
        for i, (e, z) in enumerate(zip(together.embedding.split(sizes), together.logits.split(sizes))):
            self._outputs[["", *joint][i]] = Output(e, z, {layer: values[i] for layer, values in inner.items()})
        for name, batch in self.own.items():
            if not batch.joint:
                self._outputs[name] = run(batch.images)

    def loss(self) -> Tensor:
        """The weighted base objective plus every add-on's term, from a fresh forward."""
        self._forward()
        return self._sum(self._objective(), self.local.method.addons)

    @classmethod
    def example_loss(cls, local: Local, batch: Batch, moved: Mapping[str, nn.Parameter]) -> Tensor:
        """The mean over a batch of what each example has in the loss, from a fresh forward.

        These are the objective and the terms of the add-ons that read one "example" at a time.
        """
        step = cls(local, batch, {}, moved)
        step._forward()
        return step._sum(step._objective(), [a for a in local.method.addons if a.reads == "example"])

    def public_gradient(self) -> Tensors:
        """The gradient of the terms that read "nothing" of the private data; empty if there are none."""
        total = self._sum(torch.zeros(()), [a for a in self.local.method.addons if a.reads == "nothing"])
        if not total.requires_grad:
            return {}
        names, params = list(self.trained), list(self.trained.values())
        grads = torch.autograd.grad(total, params, allow_unused=True)
        return {n: g for n, g in zip(names, grads) if g is not None}

    def _objective(self) -> Tensor:
        total = self.local.method.objective_of(self.local.task)(self.output().logits, self.batch.labels)
        return total if self.local.weight == 1.0 else self.local.weight * total

    def _sum(self, total: Tensor, addons: Iterable[AddOn]) -> Tensor:
        for addon in addons:
            term = addon.loss(self)
            if term is not None:
                total = total + term
        return total

    def compute(self) -> Tensors:
        """The gradient of `loss` at the network's current weights; a parameter that it does not reach gets zeros."""
        names, params = list(self.trained), list(self.trained.values())
        grads = torch.autograd.grad(self.loss(), params, allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads)}

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Do the step."""
        method = self.local.method
        slot = method.slot("gradient")
        compute: Callable[[], Tensors] = self.compute
        grads = slot.gradient(self, compute) if slot else compute()
        for addon in method.addons:
            addon.correct_gradient(self, grads)
        for name, param in self.trained.items():
            param.grad = grads[name]
        optimizer.step()
        for addon in method.addons:
            addon.after_step(self)
