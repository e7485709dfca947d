"""Training of a network from scratch on a small set, and measurement of its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.eval_mode import eval_mode
from distillkit._utils.options import Decay, NonNegative, Positive, PositiveInt, check_options
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import warn
from distillkit.augment import Augmentation, apply_augmentation, require_augmentation, require_normalization
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.networks._dropout import seeded_dropout
from distillkit.networks._validation import check_network, require_network, uses_batch_statistics
from distillkit.rng import as_generator
from distillkit.sets import Images, StoredImages, as_set

__all__ = ["CLASSIC", "Protocol", "accuracy", "require_protocol", "train"]


@dataclass(frozen=True)
class Protocol:
    """Protocol to train networks from scratch on a small set. The defaults are those of DC, DSA and DM.

    The source is Zhao et al. (2021 to 2023): SGD with momentum and weight decay on the mean cross-entropy of shuffled
    batches; the last batch may be smaller. As in their code, `epochs + 1` epochs are run. After epoch `epochs // 2 +
    1`, counted from zero, `lr` drops once and the momentum is reset. The last iterate is tested, without selection.

    Attributes:
        epochs: number of epochs: 1000 with augmentation; DC uses 300 without augmentation.
        lr, momentum, weight_decay, batch: options of SGD.
        lr_drop: factor by which the learning rate is multiplied when it drops.
        augment: augmentation of every batch, drawn separately for each image (not Siamese). DSA and DM evaluate with
            `DSA()`, and with `DSA(DIGITS)` on digits; DC evaluates without augmentation.
    """

    epochs: PositiveInt = 1000
    lr: Positive = 0.01
    momentum: Decay = 0.9
    weight_decay: NonNegative = 5e-4
    batch: PositiveInt = 256
    lr_drop: Positive = 0.1
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        check_options(self)
        require_augmentation(self.augment)


def require_protocol(protocol: object) -> None:
    """Check that an argument is a `Protocol`.

    Args:
        protocol: the argument to check.

    Raises:
        TypeError: the argument is not a `Protocol` instance.
    """
    if not isinstance(protocol, Protocol):
        came = f"the class {protocol.__name__}" if isinstance(protocol, type) else type(protocol).__name__
        raise TypeError(f"protocol must be a Protocol(epochs=..., lr=..., ...), got {came}")


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels if labels.ndim == 1 else labels.to(logits), reduction="sum")


CLASSIC = Protocol()
"""The published protocol without augmentation."""


def train(
    network: nn.Module,
    data: Images,
    protocol: Protocol = CLASSIC,
    *,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    callback: Callable[[int], object] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Train a network on a small set, in place, and return it in eval mode.

    Use `evaluate` to train and test several new networks.

    Args:
        network: network that maps images to logits [N, K], with the same device and dtype as the images.
        data: a set, or anything that `sets.as_set` accepts. Labels are class indices, or rows of probabilities (a
            teacher's soft labels), for which cross-entropy is the distillation loss at temperature 1 up to a constant.
        protocol: see `Protocol`.
        generator: seed or random generator for the order of the images, the augmentation, and dropout in `nn.Dropout`
            layers. Other random layers (stochastic depth) use the global random state, with a warning.
        chunk: number of images per forward and backward pass; default: `chunking.chunk_size`. Gradients of a batch are
            summed over its chunks, which is exact. With batch norm, batches are not divided into chunks.
        callback: function that is called after each epoch with the number of finished epochs.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: the set is empty, its rows are not probabilities, or the network does not fit the data.
        FloatingPointError: the loss is not finite.
    """
    require_protocol(protocol)
    data = as_set(data, name="data", progress=progress)
    images, labels = data
    if not len(data):
        raise ValueError("data must hold at least one image, got an empty set")
    if labels.ndim == 2 and not ((labels >= 0).all() and torch.allclose(labels.sum(1), labels.new_ones(len(labels)))):
        raise ValueError(
            "rows of labels must be probabilities, not negative and with sum 1; convert logits by softmax(1)"
        )
    require_normalization(protocol.augment, data.normalization)
    generator = as_generator(generator)
    check_network(require_network(network), images, classes=data.num_classes)
    network.train()
    size = protocol.batch if uses_batch_statistics(network) else chunk_size(images, chunk)
    parameters = [p for p in network.parameters() if p.requires_grad]
    velocity, lr = [torch.zeros_like(p) for p in parameters], protocol.lr
    epochs = protocol.epochs + 1
    with (
        seeded_dropout(network, generator),
        torch.enable_grad(),
        bar(epochs, "training", unit="epoch", progress=progress) as shown,
    ):
        global_state = torch.get_rng_state()
        for epoch in range(epochs):
            total = images.new_zeros(())
            order = torch.randperm(len(images), generator=generator).to(images.device)
            for index in order.split(protocol.batch):
                x, y = images.index_select(0, index), labels.index_select(0, index)
                if protocol.augment is not None:
                    x = apply_augmentation(protocol.augment, x, generator, siamese=False)
                network.zero_grad()
                for part, target in zip(x.split(size), y.split(size), strict=True):
                    loss = _loss_sum(network(part), target) / len(x)
                    loss.backward()
                    total += loss.detach()
                _step(parameters, velocity, lr, protocol)
            if not torch.isfinite(total):
                raise FloatingPointError(f"the loss is {float(total)} in epoch {epoch}: training diverged; lower lr")
            if epoch == protocol.epochs // 2 + 1:
                lr *= protocol.lr_drop
                velocity = [torch.zeros_like(p) for p in parameters]
            if epoch == 0 and not torch.equal(global_state, torch.get_rng_state()):
                warn(
                    f"{type(network).__name__} draws from PyTorch's global random state while it is trained, so "
                    "generator does not determine the result; it seeds only nn.Dropout layers (disable stochastic "
                    "depth and F.dropout)"
                )
            shown.update()
            if callback is not None:
                callback(epoch + 1)
    network.zero_grad()
    return network.eval()


@torch.no_grad()
def _step(parameters: list[nn.Parameter], velocity: list[Tensor], lr: float, protocol: Protocol) -> None:
    # Written out because the first use of torch.optim imports the compiler: a second, and 70 MB.
    for parameter, moving in zip(parameters, velocity, strict=True):
        if parameter.grad is not None:
            gradient = parameter.grad.add(parameter, alpha=protocol.weight_decay)
            parameter.sub_(moving.mul_(protocol.momentum).add_(gradient), alpha=lr)


def accuracy(network: nn.Module, data: Images | StoredImages, *, chunk: int | None = None) -> float:
    """Return the accuracy: the share of images whose largest logit belongs to their class, in [0, 1].

    Args:
        network: network that maps images to logits. It runs in eval mode; its previous mode is restored.
        data: a set with class indices, or anything that `sets.as_set` accepts. A `StoredImages` is read in chunks.
        chunk: number of images per forward pass; the default depends on device and image size.

    Raises:
        ValueError: the set is empty, or its labels are rows.
    """
    if not isinstance(data, StoredImages):
        data = as_set(data, name="data")
    if not len(data) or data.labels.ndim != 1:
        came = "an empty set" if not len(data) else f"rows of shape {list(data.labels.shape)}"
        raise ValueError(f"data must hold at least one image and have class indices as labels, got {came}")
    require_network(network)
    like = next(network.parameters(), torch.empty(0))
    images = data.read([]).images.to(like) if isinstance(data, StoredImages) else data.images
    size = chunk_size(images, chunk)
    check_network(network, images, classes=data.num_classes)
    parts = _read_chunks(data, size, like) if isinstance(data, StoredImages) else [images]
    with eval_mode(network):
        guesses = torch.cat([logits.argmax(1) for part in parts for logits in forward_chunks(network, part, size)])
    return float((guesses == data.labels.to(guesses.device)).double().mean())


def _read_chunks(data: StoredImages, size: int, like: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(data), size):
        yield data.read(slice(start, start + size)).images.to(like)
