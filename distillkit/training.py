"""Training of a network from scratch on a small set, and measurement of its accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._evaluation_checks import check_factor
from distillkit._optimizers import OPTIMIZERS
from distillkit._sanity_checks import check_perturbed, require_numbers
from distillkit._utils import check
from distillkit._utils.batches import batch_indices, require_batch_statistics, shuffled_orders, uses_batch_statistics
from distillkit._utils.devices import CHECKED_STEPS, is_accelerator
from distillkit._utils.eval_mode import eval_mode
from distillkit._utils.options import Decay, LearningRate, NonNegative, Positive, PositiveInt, check_options
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import each_warning_once, warn
from distillkit.augment import Augmentation, apply_augmentation, require_augmentation, require_normalization
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.labels._teacher import try_teacher
from distillkit.labels._views import Mixing, ViewOptions, mixed_batches, require_mixing
from distillkit.labels.relabel import Relabel
from distillkit.labels.stored_labels import StoredLabels
from distillkit.networks._base import require_network
from distillkit.networks._dropout import seeded_dropout
from distillkit.networks._validation import check_network
from distillkit.rng import as_generator
from distillkit.robustness import Perturbation, pixels_in_range, require_perturbations
from distillkit.sets import Images, StoredImages
from distillkit.sets._devices import on_device
from distillkit.sets._stored import RealImages, cached, images_like, images_of, read_batches
from distillkit.sets.as_set import open_set

__all__ = ["CLASSIC", "Protocol", "accuracy", "require_protocol", "train"]

_ROUNDING = 0.01
"""Largest difference of a row's sum from 1 that is taken for rounding."""


@dataclass(frozen=True)
class Protocol:
    """Protocol to train networks from scratch on a small set.

    The defaults are those of DC, DSA and DM (Zhao et al., 2021 to 2023): SGD with momentum and weight decay on the mean
    cross-entropy of shuffled batches, of which the last one may be smaller. The network after the last step is tested.
    A last batch of one image is merged into the batch before it if the network has batch norm, or if every image is
    mixed or relabelled.
    `distillkit.protocols.PROTOCOLS` contains the protocols of other papers.

    Attributes:
        epochs: number E of epochs. The papers use 1000 with augmentation; DC uses 300 without augmentation.
        lr, weight_decay: initial learning rate and weight decay of the optimizer.
        batch: number of images per batch.
        momentum: momentum of SGD. AdamW uses betas 0.9 and 0.999 instead.
        lr_drop: factor by which the learning rate is multiplied at each drop of the schedules "drop" and "steps".
        augment: augmentation of every batch, drawn separately for each image (not Siamese). DSA and DM evaluate with
            `DSA()`, and with `DSA(DIGITS)` on digits; DC evaluates without augmentation.
        optimizer: "sgd"; or "adamw", with no weight decay for parameters of one dimension (biases, norm layers), as in
            SRe2L and RDED.
        schedule: learning rate in epoch e, counted from 0. "drop": `lr`, which is multiplied once by `lr_drop` after
            epoch `E // 2 + 1`, where the momentum is also reset; E + 1 epochs are run, as in the code of DC, DSA and
            DM. "steps": `lr`, which is multiplied by `lr_drop` at 2/3 and again at 5/6 of the epochs (IDC). "cosine":
            `lr * (1 + cos(pi e / E)) / 2`. "half-cosine": `lr * (1 + cos(pi e / 2E)) / 2`, which ends at half of `lr`
            (RDED). "constant": `lr`.
        mix: `CutMix` or `Mixup`, applied to every batch; the labels of mixed images are averaged with the weights of
            the mix. None for no mixing.
        relabel: `Relabel` or `StoredLabels`, to train with a teacher's labels for every augmented image instead of the
            set's labels. The option `mix` must then be None; `Relabel` has an option `mix` of its own.
    """

    epochs: PositiveInt = 1000
    lr: LearningRate = 0.01
    momentum: Decay = 0.9
    weight_decay: NonNegative = 5e-4
    batch: PositiveInt = 256
    lr_drop: Positive = 0.1
    augment: Augmentation | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"
    schedule: Literal["drop", "steps", "cosine", "half-cosine", "constant"] = "drop"
    mix: Mixing | None = None
    relabel: Relabel | StoredLabels | None = None

    def __post_init__(self) -> None:
        check_options(self)
        require_augmentation(self.augment)
        require_mixing(self.mix)
        if self.relabel is not None and not isinstance(self.relabel, Relabel | StoredLabels):
            hint = "Relabel(teacher)" if isinstance(self.relabel, nn.Module) else "Relabel(teacher) or StoredLabels"
            raise TypeError(f"relabel must be None or {hint}, got {type(self.relabel).__name__}")
        if self.mix is not None and self.relabel is not None:
            raise ValueError("mix must be None with relabel, which has its own: use Relabel(teacher, mix=...)")

    @property
    def num_epochs(self) -> int:
        """Number of epochs that `train` runs: `epochs`, or `epochs + 1` if the schedule is "drop"."""
        return self.epochs + (self.schedule == "drop")

    @property
    def labels(self) -> str | None:
        """Kind of labels: "per view" if a teacher labels every augmented image; None for the labels in the data."""
        return None if self.relabel is None else "per view"

    @property
    def view_options(self) -> ViewOptions:
        """Options that determine the augmented views of the images: batch size, augmentation and mixing."""
        return ViewOptions(self.batch, self.augment, self.mix if self.relabel is None else self.relabel.mix)

    def with_teacher(self, teacher: nn.Module, *, path: str | None = None) -> Protocol:
        """Return a copy of this protocol with a teacher, which labels every augmented image during training.

        Args:
            teacher: trained network that expects the normalization of the training images, and has an output per class.
            path: path of the teacher's file. It only documents, in the record of a run, where the teacher comes from.

        Raises:
            ValueError: the option `relabel` of the protocol is not a `Relabel`.
        """
        if not isinstance(self.relabel, Relabel):
            raise ValueError("protocol must relabel to have a teacher: use Protocol(relabel=Relabel(teacher, ...))")
        return replace(self, relabel=replace(self.relabel, teacher=teacher, path=path))

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch.

        Args:
            epoch: number of the epoch, from 0.
        """
        total = self.epochs
        if self.schedule == "drop":
            return self.lr * self.lr_drop if epoch > total // 2 + 1 else self.lr
        if self.schedule == "steps":
            return self.lr * self.lr_drop ** ((epoch >= 2 * total // 3) + (epoch >= 5 * total // 6))
        if self.schedule == "constant":
            return self.lr
        period = total if self.schedule == "cosine" else 2 * total
        return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / period))

    def record(self) -> dict[str, Any]:
        """Return all options as JSON values. A teacher is described by its class, fingerprint and path."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = {name: None if values[name] is None else repr(values[name]) for name in ("augment", "mix")}
        return values | shown | {"relabel": None if self.relabel is None else self.relabel.record()}


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


CLASSIC = Protocol()
"""The published protocol without augmentation."""


@on_device("data", trains="network")
def train(
    network: nn.Module,
    data: Images | StoredImages,
    protocol: Protocol = CLASSIC,
    *,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    callback: Callable[[int], object] | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Train a network on a small set, in place, and return it in eval mode.

    Use `evaluate` to train and test several new networks.

    Args:
        network: network that maps images to logits [N, K], with the same device and dtype as the images.
        data: a set, or anything that `sets.as_set` accepts. The batches of a `StoredImages` are read ahead. Labels are
            class indices, or rows of probabilities (soft labels). For soft labels, the cross-entropy equals the
            distillation loss at temperature 1 up to a constant. Rows whose sums differ from 1 by at most 0.01, as after
            storage in half precision, are renormalized.
        protocol: training protocol.
        generator: seed or random generator for the order of the images, the augmentation, and `nn.Dropout` layers. All
            other random layers, such as stochastic depth, use the global random state; a warning is then given.
        chunk: number of images per forward and backward pass; default: `chunking.chunk_size`. Gradients of a batch are
            summed over its chunks, which is exact. With batch norm, batches are not divided into chunks.
        callback: function that is called after each epoch with the number of finished epochs.
        device: device that computes, or "auto"; the network returns to its own. Default: nothing moves.
        precision: "bf16" or "tf32" for faster, less exact products; see `docs/gpu.md`. Default: float32.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: the set is empty, its rows are not probabilities, the network does not accept the images
            or does not return K finite logits for each, or the protocol's teacher is not clearly better than chance on
            the set. For a set that no network recognizes, try the teacher on real images by `stored_soft_labels`.
        FloatingPointError: the loss is not finite.
    """
    require_protocol(protocol)
    data = cached(open_set(data, name="data", progress=progress))
    images = images_of(data)
    like = images_like(images)
    labels = data.labels.detach().to(like.device)
    if not len(data):
        raise ValueError("data must hold at least one image, got an empty set")
    labels = _probabilities(labels, like.dtype) if labels.ndim == 2 else labels
    require_normalization(protocol.augment, data.normalization)
    generator = as_generator(generator)
    check_network(require_network(network), like, classes=data.num_classes)
    with each_warning_once() as outermost:
        if outermost:
            check_factor(data.info, protocol.augment, relabel=protocol.relabel is not None)
            if isinstance(protocol.relabel, Relabel) and protocol.relabel.teacher is not None:
                try_teacher(protocol.relabel.teacher, data, "data")
    if isinstance(protocol.relabel, Relabel) and protocol.relabel.teacher is network:
        raise ValueError(
            "network must be another one than the teacher of protocol.relabel; train a new network or a copy"
        )
    network.train()
    whole = uses_batch_statistics(network)
    require_batch_statistics(network, like.new_zeros(1, *data.shape), min(protocol.batch, len(images)))
    alone = protocol.augment is None and not any(
        isinstance(m, nn.modules.dropout._DropoutNd) for m in network.modules()
    )
    ahead = CHECKED_STEPS if alone and is_accelerator(like.device) else 1
    batches = _batches(protocol, whole, images, labels, data.num_classes, generator, ahead)
    temperature, scale = 1.0, 1.0
    if protocol.relabel is not None:
        temperature = protocol.relabel.temperature
        scale = temperature**2 if protocol.relabel.scale_loss else 1.0
    if callback is not None:
        check.callable_with(callback, "callback", ["epochs"], "a function of the number of epochs so far")
    optimizer = OPTIMIZERS[protocol.optimizer](network, protocol.momentum, protocol.weight_decay)
    epochs = protocol.num_epochs
    with (
        seeded_dropout(network, generator),
        torch.enable_grad(),
        bar(epochs, "training", unit="epoch", progress=progress) as shown,
    ):
        global_state = torch.get_rng_state()
        for epoch in range(epochs):
            total = like.new_zeros(())
            for x, y in batches(epoch):
                network.zero_grad()
                size = len(x) if whole else chunk_size(like, chunk)
                for part, target in zip(x.split(size), y.split(size), strict=True):
                    logits = network(part) if temperature == 1 else network(part) / temperature
                    loss = F.cross_entropy(logits, target, reduction="sum") * scale / len(x)
                    check.differentiable(loss, "network", "its parameters").backward()
                    total += loss.detach()
                optimizer.step(protocol.lr_at(epoch))
                torch.clear_autocast_cache()  # of the weights before this step
            read = (epoch + 1) % CHECKED_STEPS == 0 or epoch == epochs - 1 or not is_accelerator(like.device)
            if read and not torch.isfinite(total):
                raise FloatingPointError(f"the loss is {float(total)} in epoch {epoch}: training diverged; lower lr")
            if protocol.schedule == "drop" and epoch == protocol.epochs // 2 + 1:
                optimizer.reset()
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


def _probabilities(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of probabilities in the given dtype, divided by their sums if the sums differ slightly from 1."""
    rows = rows.to(dtype)
    sums = rows.sum(1, keepdim=True)
    if not ((rows >= 0).all() and (sums - 1).abs().max() <= _ROUNDING):
        raise ValueError(
            "rows of labels must be probabilities, not negative and with sum 1; convert logits by softmax(1)"
        )
    return rows if torch.allclose(sums, torch.ones_like(sums)) else rows / sums


def _batches(
    protocol: Protocol,
    merge_single: bool,
    images: Tensor | StoredImages,
    labels: Tensor,
    classes: int,
    generator: torch.Generator,
    ahead: int,
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return a function that takes the index of an epoch and yields the epoch's batches, each with its labels."""
    options, relabel = protocol.view_options, protocol.relabel
    if relabel is None and protocol.mix is None:
        orders = shuffled_orders(len(images), generator, labels.device, protocol.num_epochs, ahead)
        return lambda epoch: _plain_batches(merge_single, images, labels, options, next(orders), generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    if relabel is not None:
        relabel.require(images, classes, options)
        return lambda epoch: relabel.batches(images, options, seed, epoch)
    rows = labels if labels.ndim == 2 else F.one_hot(labels, classes).to(images_like(images).dtype)
    return lambda epoch: mixed_batches(images, rows, options, seed, epoch)


def _plain_batches(
    merge_single: bool,
    images: Tensor | StoredImages,
    labels: Tensor,
    options: ViewOptions,
    order: Tensor,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    batches = batch_indices(order, options.batch, merge_single=merge_single)
    for index, x in zip(batches, read_batches(images, batches), strict=True):
        y = labels.index_select(0, index)
        if options.augment is not None:
            x = apply_augmentation(options.augment, x, generator, siamese=False)
        yield x, y


@on_device("data")
def accuracy(
    network: nn.Module,
    data: Images | StoredImages,
    *,
    against: Perturbation | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
) -> float:
    """Return the accuracy: the share of images whose largest logit belongs to their class, in [0, 1].

    Args:
        network: network that maps images to logits. It runs in eval mode; its previous mode is restored.
        data: a set with class indices, or anything that `sets.as_set` accepts. A `StoredImages` is read in chunks.
        against: corruption or attack that changes the images first, see `distillkit.robustness`; or None. The images
            must be pixels in [0, 1] after removing their normalization.
        generator: seed or random generator for the draws of `against`.
        chunk: number of images per forward pass; the default depends on device and image size.
        device: device that computes, or "auto". Default: nothing moves.
        precision: "bf16" or "tf32" for faster, less exact products; see `docs/gpu.md`. Default: float32.

    Raises:
        ValueError: the set is empty, its labels are not class indices, the network returns NaN, or `against` is given
            and the set's pixels are not in [0, 1] or `against` returns no finite images.
    """
    data = open_set(data, name="data")
    if not len(data) or data.labels.ndim != 1:
        came = "an empty set" if not len(data) else f"rows of shape {list(data.labels.shape)}"
        raise ValueError(f"data must hold at least one image and have class indices as labels, got {came}")
    require_network(network)
    if against is not None:
        [against] = require_perturbations([against]).values()
    like = next(network.parameters(), torch.empty(0))
    images = data._empty.images.to(like) if isinstance(data, StoredImages) else data.images
    size = chunk_size(images, chunk)
    check_network(network, images, classes=data.num_classes, probabilities="accept" if against is None else "warn")
    parts: Iterable[Tensor] = images.split(size)
    if isinstance(data, StoredImages):
        parts = (part.to(like) for part in read_batches(data, torch.arange(len(data)).split(size)))
    generator = as_generator(generator)
    if against is not None:
        parts = _perturbed(network, parts, data, against, generator)
    with eval_mode(network):
        logits = torch.cat(list(forward_chunks(network, parts, size)))
    seen = "data" if against is None else f"data under {against}"
    require_numbers(logits, f"network ({type(network).__name__})", seen)
    guesses = logits.argmax(1)
    return float((guesses == data.labels.to(guesses.device)).double().mean())


def _perturbed(
    network: nn.Module,
    parts: Iterable[Tensor],
    data: RealImages,
    against: Perturbation,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    normalization, first = data.normalization, 0
    for images in parts:
        pixels = pixels_in_range(images, normalization, "data")
        labels = data.labels[first : first + len(images)].to(images.device)
        changed = against(pixels, labels, lambda x: network(normalization.encode(x)), generator)
        yield normalization.encode(check_perturbed(changed, pixels, str(against)).detach().clamp(0, 1))
        first += len(images)
