"""Messages that `invert_message` can attack: the gradient of one training step, or the update of several steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from attacks.inversion._inputs import check_update, compute_logits, copy_state
from attacks.inversion.labels import class_counts, infer_label
from distillkit._utils import check
from distillkit._utils.batches import batch_indices, uses_batch_statistics
from distillkit._utils.user_warnings import warn, without_warnings

_State = dict[str, Tensor]


class Gradient:
    """Gradient of one step of federated SGD, for the mean cross-entropy of a batch. Implements `ObservedMessage`.

    Args:
        network: network with the client's weights, in the mode (training or eval) in which the client computed the
            gradient. It is not changed. In training mode, dropout would draw new masks at each step of the attack, so
            use eval mode for a network with dropout.
        gradients: one tensor per parameter, in the order of `network.parameters()`.

    A network with batch norm in training mode uses the statistics of the batch, so its gradient differs from that in
    eval mode. The mode of the network must therefore be that of the client; a warning names the assumed mode if the
    network is in training mode and has dropout or batch norm.

    Raises:
        TypeError, ValueError: `network` is not a network, or the gradients have other shapes than its parameters, are
            not finite, or are all 0.
    """

    ordered = False

    def __init__(self, network: nn.Module, gradients: Sequence[Tensor]) -> None:
        self.observed = check_update(network, gradients, "gradients")
        self.network = network
        _warn_of_mode(network)

    @staticmethod
    def of(network: nn.Module, images: Tensor, labels: Tensor) -> Gradient:
        """Return the message that a client with these images sends. Use it to test an attack or a defence.

        Args:
            network: network of the client, in the mode (training or eval) in which the client computes the gradient.
            images: images of the client, float [N, C, H, W], normalized for the network.
            labels: class indices of the images, int [N].
        """
        return Gradient(network, _gradient(network, copy_state(network), images, labels))

    def replay(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient for given images, one tensor per parameter, differentiable with respect to the images.

        Args:
            images: candidate images, float [N, C, H, W].
            labels: class indices of the images, int64 [N].
        """
        return _gradient(self.network, copy_state(self.network), images, labels, graph=True)

    def count_classes(self, images: Tensor) -> int:
        """Return the number of classes: the number of logits that the network gives for `images` [N, C, H, W]."""
        return compute_logits(self.network, images).shape[1]

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Infer the labels of the images, int64 [count], from the gradient of the last layer.

        The bias gradient is passed to `class_counts`. If the layer has no bias, the label of a single image comes from
        the weight's gradient by `infer_label`.

        Args:
            count: number of images in the batch.
            noise: random images, float [M, C, H, W]. If `count` is above 1, the network's mean prediction for these
                images replaces its unknown mean prediction for the batch.

        Raises:
            ValueError: the last layer has no bias, and there are several images.
        """
        predictions = compute_logits(self.network, noise).softmax(1)
        return _read_labels(self.observed[-1], predictions.shape[1], count, predictions if count > 1 else None)


class FedAvgUpdate:
    """Update of a FedAvg client after several local steps: its weights after training minus those that it received.

    Implements `ObservedMessage`. The attack differentiates through every step of local SGD. The attacker does not know
    the order in which the client uses its images. In the first epoch this does not matter: the unknown images can be
    numbered in the order of their use. If no labels are passed to `invert_message`, each restart of the attack assigns
    the inferred labels to the batches in another order, so use several restarts. In later epochs the attack assumes the
    order of the first epoch. This is an approximation, which works if each step is small.

    Args:
        network: network with the weights that the client received, in the mode in which it trained; see `Gradient`.
        update: weights after training minus weights before, one tensor per parameter, in the order of
            `network.parameters()`.
        lr: the client's learning rate, > 0. A server knows it if it sets the rate itself.
        epochs: number of epochs over the images.
        batch: number of images per step; the last batch of an epoch may be smaller. None for all images. As in
            `fl.FedAvg`, a last batch of one image is merged into the batch before it if the network uses batch
            statistics.
        momentum, weight_decay: options of SGD, as in PyTorch.
        order: indices of the images in each batch of the whole training, if the order is known; one int tensor per
            step. It replaces `epochs` and `batch`.

    Raises:
        TypeError, ValueError: `network` is not a network; the update has other shapes than its parameters, is not
            finite, or is all 0; or an option is out of range.

    Sources: Geiping et al., "Inverting Gradients" (NeurIPS 2020), Section 6, who differentiate through several local
    steps; Dimitrov et al., "Data Leakage in Federated Averaging" (TMLR 2022), on batches and epochs in unknown order.
    Dimitrov et al. relate the images of different epochs by a prior; we assume the same images in the same order.
    Labels are inferred from the change of the last bias as in Geng et al. (2021): the change gives the mean gradient of
    the steps, which is combined with the network's mean prediction before and after training.
    """

    def __init__(
        self,
        network: nn.Module,
        update: Sequence[Tensor],
        *,
        lr: float,
        epochs: int = 1,
        batch: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        order: Sequence[Tensor] | None = None,
    ) -> None:
        self.observed = check_update(network, update, "update")
        self.network = network
        _warn_of_mode(network)
        self.lr = check.learning_rate(lr)
        self.epochs = check.positive_int(epochs, "epochs")
        self.batch = None if batch is None else check.positive_int(batch, "batch")
        self.momentum = check.real_number(momentum, "momentum", least=0, below=1)
        self.weight_decay = check.real_number(weight_decay, "weight_decay", least=0)
        self.order = None if order is None else _batches(order, epochs, batch)
        self.ordered = self.order is not None or batch is not None

    @staticmethod
    def of(
        network: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        lr: float,
        epochs: int = 1,
        batch: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        order: Sequence[Tensor] | None = None,
    ) -> FedAvgUpdate:
        """Return the message that a client with these images sends. Use it to test an attack or a defence.

        Args:
            network, lr, epochs, batch, momentum, weight_decay: the client's network and options of its training, as in
                the constructor.
            images: images of the client, float [N, C, H, W], normalized for the network.
            labels: class indices of the images, int [N].
            order: indices of the images in each batch of the client's training, one int tensor per step. Default: the
                order of `images`. The returned message does not contain `order`, because the attacker does not know it,
                but contains `epochs` and `batch`, which must agree with `order`.

        Raises:
            ValueError: the number of batches differs from what `epochs` and `batch` imply.
        """
        blank = [torch.ones_like(p) for p in network.parameters()]
        made = partial(FedAvgUpdate, network, lr=lr, momentum=momentum, weight_decay=weight_decay)
        client = made(blank, epochs=epochs, batch=batch)
        if order is not None:
            steps, client = len(client._steps(len(images))), made(blank, order=order)
            if len(order) != steps:
                raise ValueError(
                    f"order must have {steps} batch(es), as epochs={epochs} and batch={batch} make of {len(images)} "
                    f"images, got {len(order)}: give epochs and batch as the client has them"
                )
        return made(client.replay(images, labels), epochs=epochs, batch=batch)

    def replay(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return the update of local SGD on given images, one tensor per parameter, differentiable in the images.

        Args:
            images: candidate images, float [N, C, H, W].
            labels: class indices of the images, int64 [N].
        """
        first, buffers = copy_state(self.network)
        parameters, moving = dict(first), {k: torch.zeros_like(p) for k, p in first.items()}
        for rows in self._steps(len(images)):
            rows = rows.to(images.device)
            state = parameters, buffers
            gradients = _gradient(self.network, state, images[rows], labels[rows], graph=True, zeros=False)
            for (name, value), gradient in zip(parameters.items(), gradients):
                if gradient is not None:  # SGD does not decay unused parameters
                    moving[name] = self.momentum * moving[name] + gradient + self.weight_decay * value
            parameters = {name: value - self.lr * moving[name] for name, value in parameters.items()}
        return tuple(parameters[name] - first[name] for name in first)

    def count_classes(self, images: Tensor) -> int:
        """Return the number of classes: the number of logits that the network gives for `images` [N, C, H, W]."""
        return compute_logits(self.network, images).shape[1]

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Infer the labels of the client's images, int64 [count], from the change of the last layer's bias.

        The mean gradient of the local steps is computed from this change, and passed to `class_counts`.

        Args:
            count: number of images of the client.
            noise: random images, float [M, C, H, W]. If `count` is above 1, the network's mean prediction for these
                images, before and after training, replaces its unknown prediction for the client's images.

        Raises:
            ValueError: the last layer has no bias, and there are several images.
        """
        before = compute_logits(self.network, noise).softmax(1)
        changed = {k: p.detach() + u for (k, p), u in zip(self.network.named_parameters(), self.observed)}
        after = compute_logits(self.network, noise, changed).softmax(1)
        steps = len(self._steps(count))
        # With momentum, the gradient of a step also moves the weights in every later step.
        times = sum(self.momentum**k for step in range(steps) for k in range(steps - step))
        gradient = -self.observed[-1] / (self.lr * times)
        predictions = (before + after) / 2
        return _read_labels(gradient, predictions.shape[1], count, predictions if count > 1 else None)

    def _steps(self, count: int) -> list[Tensor]:
        if self.order is None:
            merges = uses_batch_statistics(self.network)
            return batch_indices(torch.arange(count), self.batch or count, merge_single=merges) * self.epochs
        if (most := max(int(rows.max()) for rows in self.order)) >= count:
            raise ValueError(f"order must point into the {count} images, got the index {most}")
        return list(self.order)


def _warn_of_mode(network: nn.Module) -> None:
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    found = sorted({type(layer).__name__ for layer in network.modules() if isinstance(layer, kinds) and layer.training})
    if found:
        warn(
            f"network is in training mode and has {' and '.join(found)}, so the attack assumes that the client "
            "computed its message in training mode; call network.eval() if it did not"
        )


def _gradient(
    network: nn.Module,
    state: tuple[_State, _State],
    images: Tensor,
    labels: Tensor,
    *,
    graph: bool = False,
    zeros: bool = True,
) -> tuple[Tensor, ...]:
    """Return the gradient by parameter; parameters that the network does not use have zeros, or None if not `zeros`."""
    parameters, buffers = state
    out = functional_call(network, {**parameters, **buffers}, (images,))
    value = F.cross_entropy(out, labels)
    own = list(parameters.values())
    return torch.autograd.grad(value, own, create_graph=graph, allow_unused=True, materialize_grads=zeros)


def _read_labels(last: Tensor, classes: int, count: int, predictions: Tensor | None) -> Tensor:
    """Infer labels from the gradient of a network's last parameter, which is a bias or a weight."""
    if last.shape == (classes,):
        with without_warnings():  # the change of several steps is no gradient of one batch
            counts = class_counts(last, count, predictions)
        return torch.arange(classes, device=last.device).repeat_interleave(counts)
    if count == 1 and last.ndim == 2 and len(last) == classes > 2:
        return torch.tensor([infer_label(last)], device=last.device)
    raise ValueError(
        "labels must be given: they are inferred from the last layer's bias, but the network's last parameter is "
        f"{list(last.shape)} for {classes} classes"
    )


def _batches(order: Sequence[Tensor], epochs: int, batch: int | None) -> tuple[Tensor, ...]:
    if epochs != 1 or batch is not None:
        raise ValueError("order replaces epochs and batch: give either order or both of these")
    rows = check.sequence(order, "order", "index tensors, one per step")
    if not rows:
        raise ValueError("order must hold at least one batch, got none")
    return tuple(check.class_labels(one, None, None, "order") for one in rows)
