"""Training a network from scratch on a small set, and testing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._sanity_checks import warn
from distillkit._utils import check
from distillkit._utils.eval_mode import eval_mode
from distillkit._utils.progress import bar
from distillkit.augment import Augmentation, apply_augmentation, require_augmentation, require_normalization
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.networks._dropout import seeded_dropout
from distillkit.networks._validation import check_network, require_network, uses_batch_statistics
from distillkit.rng import as_generator
from distillkit.sets import Images, StoredImages, as_set

__all__ = ["CLASSIC", "Protocol", "accuracy", "require_protocol", "train"]


@dataclass(frozen=True)
class Protocol:
    """How a network is trained from scratch on a small set, so that results compare: by default as DC, DSA and DM do.

    (Zhao et al., 2021 to 2023.) SGD with momentum and weight decay on the mean cross-entropy of shuffled batches, the
    last one may be smaller. As in their code, `epochs + 1` epochs are run; `lr` falls once, after epoch `epochs // 2 +
    1` counted from zero, and the momentum starts anew there. Nothing is selected on the test set: the last iterate
    counts.

    Attributes:
        epochs: E. 1000 with augmentation; DC without it takes 300.
        lr, momentum, weight_decay, batch: of SGD.
        lr_drop: the factor by which lr falls.
        augment: applied to every batch, each image with a draw of its own (not Siamese). DSA and DM evaluate with
            `DSA()`, on digits with `DSA(DIGITS)`; DC without.
    """

    epochs: int = 1000
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch: int = 256
    lr_drop: float = 0.1
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        check.positive_int(self.epochs, "epochs")
        check.positive_int(self.batch, "batch")
        check.real_number(self.lr, "lr", above=0.0)
        check.real_number(self.lr_drop, "lr_drop", above=0.0)
        check.real_number(self.momentum, "momentum", least=0.0, below=1.0)
        check.real_number(self.weight_decay, "weight_decay", least=0.0)
        require_augmentation(self.augment)


def require_protocol(protocol: object) -> None:
    """Refuse what a user gave as `protocol` unless it is one.

    Args:
        protocol: what was given.

    Raises:
        TypeError: a class, a name, a mapping of options.
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
    """Train a network on a small set by the classic protocol, in place; return it, in eval mode.

    `evaluate` does so for fresh networks and tests them; call `train` where you want the network itself.

    Args:
        network: maps images to logits [N, K]; on the device and of the dtype of the images.
        data: a set, or what `sets.as_set` takes; its labels are class indices, or rows of probabilities (a teacher's
            soft labels), for which cross-entropy is the distillation loss at temperature 1 up to a constant.
        protocol: see `Protocol`.
        generator: decides the shuffles and the augmentation, and the dropout of `nn.Dropout` layers. A network that
            draws otherwise (stochastic depth) does so from the global random state, which a warning tells.
        chunk: images per forward and backward pass; default `chunking.chunk_size`. Gradients of a batch are summed over
            its chunks, which is exact; with batch norm a batch is never cut.
        callback: called with the number of epochs done, after each.
        progress: whether long work shows a bar (see `distillkit._utils.progress`).

    Raises:
        TypeError, ValueError: an empty set, or rows that are not probabilities; a network that does not fit the data.
        FloatingPointError: the loss is no longer finite.
    """
    require_protocol(protocol)
    data = as_set(data, name="data", progress=progress)
    images, labels = data
    if not len(data):
        raise ValueError("data must hold at least one image, got an empty set")
    if labels.ndim == 2 and not ((labels >= 0).all() and torch.allclose(labels.sum(1), labels.new_ones(len(labels)))):
        raise ValueError(
            "labels that are rows must be probabilities: not negative, each row summing to 1; "
            "logits become such by softmax(1)"
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
                    "generator does not decide the result; only nn.Dropout layers are seeded from it (stochastic "
                    "depth and F.dropout are not: switch them off)"
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
    """Test a network: the share of images whose largest logit is that of their class, in [0, 1].

    Args:
        network: maps images to logits; it runs in eval mode, and its own mode is put back.
        data: a set with class indices, or what `sets.as_set` takes. A `StoredImages` is read a chunk at a time.
        chunk: images per forward pass; default by device and size.

    Raises:
        ValueError: an empty set, or labels that are rows.
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
    parts = _read_by(data, size, like) if isinstance(data, StoredImages) else [images]
    with eval_mode(network):
        guesses = torch.cat([logits.argmax(1) for part in parts for logits in forward_chunks(network, part, size)])
    return float((guesses == data.labels.to(guesses.device)).double().mean())


def _read_by(data: StoredImages, size: int, like: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(data), size):
        yield data.read(slice(start, start + size)).images.to(like)
