"""One step of local training: the forward pass of its batches, the loss, and the gradient of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions
from distillkit.networks._base import Network, SplitNetwork
from fl._components import Component
from fl.averaging.local import Local, Term
from fl.batches import Batch
from fl.message import Tensors


@dataclass(frozen=True)
class Output(CheckedOptions):
    """Outputs of the network for a batch of B images. They are part of the autograd graph.

    Attributes:
        embedding: output of the feature extractor and input of the classifier, [B, d], with embeddings of length d.
        logits: output of the classifier, [B, outputs]: first the logits of the task's classes, then those of additional
            label classes that add-ons use.
        inner: outputs of the modules named in `AddOn.layers`: a mapping from the name to the output, flattened to B
            rows.
    """

    embedding: Tensor
    logits: Tensor
    inner: Annotated[Mapping[str, Tensor], check.mapping] = field(default_factory=dict)


def outputs(network: Network, images: Tensor, layers: Mapping[str, nn.Module] | None = None) -> Output:
    """Run one forward pass of the network, and return its outputs, including those of the modules in `layers`.

    Args:
        network: network, split into features and classifier.
        images: float [B, C, H, W].
        layers: modules of the network, by name, whose outputs to return. None: no modules.

    Raises:
        ValueError: a module in `layers` did not run exactly once, or its output does not have one row per image.
    """
    found: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if name in found or not isinstance(output, Tensor) or output.ndim < 2 or len(output) != len(images):
            given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            got = "a second run" if name in found else f"{given} for {len(images)} images"
            raise ValueError(
                f"layer {name!r} must run once in a forward pass and give a tensor with a row for each image, got "
                f"{got}; name another layer"
            )
        found[name] = output.flatten(1).clone()  # later modules may change the tensor in place

    with ExitStack() as hooks:
        for name, module in (layers or {}).items():
            hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        if isinstance(network, SplitNetwork):
            embedding, logits = network.outputs(images)
        else:
            embedding = network.features(images)
            logits = network.classifier(embedding)
    if missing := [name for name in layers or {} if name not in found]:
        raise ValueError(f"layer {missing[0]!r} did not run in a forward pass of the network; name one that does")
    return Output(embedding, logits, found)


class Step:
    """One optimizer step of local training: the argument `step` of `AddOn.loss` and other hooks.

    A new object is made for each step. Its methods compute the loss and the gradient; then the optimizer changes the
    parameters.

    Attributes:
        local: training to which the step belongs.
        batch: batch of the training set.
        extra: batches that add-ons supply (`AddOn.extra_batches`), by add-on key.
        trained: the parameters that this step trains, by name.
    """

    def __init__(
        self, local: Local, batch: Batch, extra: Mapping[str, Batch], trained: Mapping[str, nn.Parameter]
    ) -> None:
        self.local, self.batch, self.extra, self.trained = local, batch, extra, trained
        self._outputs: dict[str, Output] = {}

    def output(self, addon: Component | None = None) -> Output:
        """Return the network's outputs for the batch of the training set, or for the batch that `addon` supplies."""
        return self._outputs["" if addon is None else addon.key]

    def has_batch(self, addon: Component) -> bool:
        """Return whether `addon` supplies a batch of its own in this step (see `AddOn.extra_batches`)."""
        return addon.key in self.extra

    def batch_of(self, addon: Component) -> Batch:
        """Return the batch that `addon` supplies in this step (see `AddOn.extra_batches`)."""
        return self.extra[addon.key]

    def _forward(self) -> None:
        run = partial(outputs, self.local.network, layers=self.local.layers)
        joint = [key for key, batch in self.extra.items() if batch.joint]
        parts = [self.batch.images, *(self.extra[key].images for key in joint)]
        together = run(torch.cat(parts) if joint else self.batch.images)
        sizes = [len(part) for part in parts]
        inner = {layer: values.split(sizes) for layer, values in together.inner.items()}
        for i, (e, z) in enumerate(zip(together.embedding.split(sizes), together.logits.split(sizes))):
            self._outputs[["", *joint][i]] = Output(e, z, {layer: values[i] for layer, values in inner.items()})
        for key, batch in self.extra.items():
            if not batch.joint:
                self._outputs[key] = run(batch.images)

    def loss(self) -> Tensor:
        """Run a forward pass and return the loss: `Local.weight` times the objective, plus the add-ons' terms."""
        self._forward()
        return self._sum(self._objective(), self.local.terms)

    @classmethod
    def example_loss(cls, local: Local, batch: Batch, trained: Mapping[str, nn.Parameter]) -> Tensor:
        """Run a new forward pass, and return the mean loss of the examples in a batch, which `DPSGD` captures.

        The loss is `Local.weight` times the objective, plus the terms of add-ons with `data_access` "example".

        Args:
            local: training to which the step belongs.
            batch: images and labels.
            trained: the parameters that the step trains, by name.
        """
        step = cls(local, batch, {}, trained)
        step._forward()
        return step._sum(step._objective(), [a for a in local.terms if a.data_access == "example"])

    def public_gradient(self) -> Tensors:
        """Return the gradient of the loss terms of add-ons that read no private data (`data_access` "none").

        Parameters on which these terms do not depend are missing from the result.
        """
        total = self._sum(torch.zeros(()), [a for a in self.local.terms if a.data_access == "none"])
        if not total.requires_grad:
            return {}
        names, params = list(self.trained), list(self.trained.values())
        grads = torch.autograd.grad(total, params, allow_unused=True)
        return {n: g for n, g in zip(names, grads) if g is not None}

    def gradient(self) -> Tensors:
        """Return the gradient of the loss at the current weights, by name of the parameters in `trained`.

        It is zero for a parameter on which the loss does not depend.
        """
        names, params = list(self.trained), list(self.trained.values())
        grads = torch.autograd.grad(self.loss(), params, allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads)}

    def _objective(self) -> Tensor:
        local = self.local
        total = local.settings.objective_of(local.task)(self.output().logits, self.batch.labels)
        return total if local.weight == 1.0 else local.weight * total

    def _sum(self, total: Tensor, terms: Iterable[Term]) -> Tensor:
        for one in terms:
            term = one.loss(self)
            if term is None:
                continue
            if not isinstance(term, Tensor) or term.numel() != 1:
                got = f"a tensor {list(term.shape)}: take its mean" if isinstance(term, Tensor) else type(term).__name__
                raise TypeError(f"{type(one).__name__}.loss must return a loss tensor, or None, got {got}")
            total = total + term
        return total


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a context manager that restores the exact values of tensors at the end of its `with` block.

    Args:
        tensors: parameters or buffers that the block changes in place.
    """
    kept = [(t, t.detach().clone()) for t in tensors]
    yield
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
