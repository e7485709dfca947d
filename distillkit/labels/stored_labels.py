"""Stored soft labels of a teacher for augmented views of images. Training with these labels needs no teacher."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.display import stable_repr
from distillkit._utils.files import read_tensors, write_tensors
from distillkit._utils.options import NonNegativeInt, Options, PositiveInt, Temperature, check_options
from distillkit._utils.progress import bar
from distillkit.fingerprint import tensor_fingerprint
from distillkit.labels._rows import label_rows
from distillkit.labels._teacher import try_teacher
from distillkit.labels._views import Mixing, ViewOptions, views
from distillkit.labels.mixing import CutMix, Mixup
from distillkit.labels.relabel import Relabel
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, StoredImages
from distillkit.sets._devices import on_device
from distillkit.sets._stored import cached, images_of
from distillkit.sets.as_set import open_set

_FORMAT = "distillkit.StoredLabels/1"


class _TrainingViews(Protocol):
    """Interface of the attributes of `distillkit.training.Protocol` that determine the augmented images ("views")."""

    @property
    def relabel(self) -> object: ...
    @property
    def view_options(self) -> ViewOptions: ...
    @property
    def num_epochs(self) -> int: ...


@dataclass(frozen=True, eq=False)
class StoredLabels:
    """A teacher's soft labels for the views of some epochs. `stored_soft_labels` creates objects of this class.

    A view is an augmented image, which may be mixed with another image of its batch. Pass this object as `relabel=` to
    the `Protocol` for which it was computed. In an epoch whose labels are stored, training uses these labels. In any
    other epoch, it uses the views and labels of an epoch that is drawn at random from the stored ones. The views are
    not stored: they are recomputed from `seed`, the epoch and the batch number. The drawn epoch depends only on `seed`
    and the current epoch. Therefore all networks are trained on the same views.

    Attributes:
        logits: the teacher's logits in half precision, [E, N, k], for E epochs, N images and the k largest logits of
            each view. The largest logit of each view is subtracted from its logits.
        classes: class index of each logit, integer [E, N, k], or None if the logits of all K classes are stored, in
            order.
        epochs: numbers of the stored epochs, ascending.
        num_classes: number of classes, K.
        mix: how each augmented image is mixed with another one, `CutMix` or `Mixup`; None for no mixing.
        temperature, scale_loss: as in `Relabel`. You can change them with `dataclasses.replace`.
        seed: seed of the views.
        made_with: the options of the views, a fingerprint of the images and a description of the teacher, as JSON
            values. Training with other images or options is refused.
    """

    logits: Tensor
    classes: Tensor | None
    epochs: tuple[int, ...]
    num_classes: PositiveInt
    mix: Mixing | None
    temperature: Temperature
    scale_loss: bool
    seed: NonNegativeInt
    made_with: Options

    def __post_init__(self) -> None:
        check_options(self)
        ascending = list(self.epochs) == sorted({check.positive_int(e, "epochs", least=0) for e in self.epochs})
        shape, index = tuple(self.logits.shape), self.classes
        if self.logits.dtype != torch.float16 or len(shape) != 3 or shape[0] != len(self.epochs) or not ascending:
            raise ValueError(f"logits {self.logits.dtype} {list(shape)} do not fit {len(self.epochs)} epochs")
        if not self.epochs or not bool(torch.isfinite(self.logits).all()):
            raise ValueError("logits must be finite, for at least one epoch")
        if index is None:
            if shape[2] != self.num_classes:
                raise ValueError(f"{shape[2]} logits of {self.num_classes} classes need their class indices")
        elif index.shape != shape or index.is_floating_point() or not 0 < shape[2] <= self.num_classes:
            raise ValueError(f"classes {index.dtype} {list(index.shape)} do not fit logits {list(shape)}")
        elif index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.num_classes:
            raise ValueError(f"classes must be in [0, {self.num_classes}), got up to {int(index.max())}")

    @property
    def bytes(self) -> int:
        """Number of bytes of the stored logits and classes."""
        return sum(t.numel() * t.element_size() for t in (self.logits, self.classes) if t is not None)

    def save(self, path: str | Path) -> None:
        """Save the labels to a safetensors file.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written, for example because its folder does not exist.
        """
        tensors = {"logits": self.logits} | ({} if self.classes is None else {"classes": self.classes})
        facts = {
            "epochs": self.epochs, "num_classes": self.num_classes, "temperature": self.temperature,
            "scale_loss": self.scale_loss, "seed": self.seed, "made_with": self.made_with,
            "mix": None if self.mix is None else [type(self.mix).__name__, asdict(self.mix)],
        }  # fmt: skip
        write_tensors(check.path(path, "path"), tensors, {"format": _FORMAT, "facts": json.dumps(facts)})

    @staticmethod
    def load(path: str | Path) -> StoredLabels:
        """Load stored labels from a file that `save` wrote.

        Args:
            path: path of the file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged, or does not contain stored labels.
        """
        tensors, metadata = read_tensors(path := check.path(path, "path"), kind=_FORMAT, content="stored labels")
        try:
            facts = json.loads(metadata["facts"])
            facts["epochs"] = tuple(facts["epochs"])
            if facts["mix"] is not None:
                kind, given = facts["mix"]
                facts["mix"] = {"CutMix": CutMix, "Mixup": Mixup}[kind](**given)
            loaded = StoredLabels(tensors.pop("logits"), tensors.pop("classes", None), **facts)
            if tensors:
                raise ValueError(f"it has other tensors: {', '.join(tensors)}")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error
        return loaded

    def require(self, images: Tensor | StoredImages, classes: int, options: ViewOptions) -> None:
        """Check before training that the labels belong to these images and options.

        The stored labels are those of augmented and possibly mixed versions of the images, called views.

        Args:
            images: images of the set, float [N, C, H, W], or the set if it is stored.
            classes: number of classes, K.
            options: batch size, augmentation and mixing of the views.

        Raises:
            ValueError: the labels were computed with other images, another number of classes or other options.
        """
        now = _describe(images, options)
        for key, was in self.made_with.items():
            if key in now and now[key] != was:
                raise ValueError(
                    f"protocol has stored labels of other views: they were made with {key}={was}, got {now[key]}"
                )
        if self.logits.shape[1] != len(images):
            raise ValueError(f"protocol has stored labels of {self.logits.shape[1]} images, but data has {len(images)}")
        if classes != self.num_classes:
            raise ValueError(f"protocol has stored labels of {self.num_classes} classes, but the data has {classes}")

    def batches(
        self, images: Tensor | StoredImages, options: ViewOptions, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of views (augmented, possibly mixed images) of one epoch, and their stored soft labels.

        Args:
            images: as in `require`.
            options: batch size, augmentation and mixing of the views.
            seed: ignored, because the stored seed determines the views.
            epoch: number of the epoch.
        """
        at = self._position(epoch)
        logits, classes = self.logits[at], None if self.classes is None else self.classes[at].to(torch.int64)
        for view in views(images, options, self.seed, self.epochs[at]):
            values = logits[view.rows].to(view.images.device, non_blocking=True)
            index = None if classes is None else classes[view.rows].to(view.images.device, non_blocking=True)
            yield view.images, label_rows(values, index, self.num_classes, self.temperature, view.images.dtype)

    def _position(self, epoch: int) -> int:
        if epoch in self.epochs:
            return self.epochs.index(epoch)
        return int(torch.randint(len(self.epochs), (), generator=derive(self.seed, epoch, "stored epoch")))

    def record(self) -> dict[str, Any]:
        """Return these labels' options and number of epochs as JSON values, and a fingerprint of the logits."""
        tensors = [t for t in (self.logits, self.classes) if t is not None]
        return {
            "stored": tensor_fingerprint(tensors), "epochs": len(self.epochs), "top_k": self.logits.shape[2],
            "bytes": self.bytes, "temperature": self.temperature, "scale_loss": self.scale_loss, "seed": self.seed,
            **self.made_with,
        }  # fmt: skip

    def __repr__(self) -> str:
        epochs, count, k = self.logits.shape
        return f"StoredLabels({epochs} epochs of {count} images, {k} of {self.num_classes} logits, {self.bytes} bytes)"


@on_device("small", "pool")
def stored_soft_labels(
    small: Images | StoredImages,
    protocol: _TrainingViews,
    *,
    epochs: Iterable[int] | None = None,
    pool: Images | StoredImages | None = None,
    generator: int | torch.Generator = 0,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: bool = True,
) -> StoredLabels:
    """Compute a teacher's soft labels for the views of some epochs, so that training does not need the teacher.

    A view is an augmented image, which may be mixed with another image of its batch. For each view, the result contains
    the teacher's `top_k` largest logits in half precision, where `top_k` is an option of `Relabel`. The result does not
    contain the views, which are recomputed from the seed, the epoch and the batch number.

        labels = stored_soft_labels(small, protocol, epochs=range(0, 300, 10))
        evaluate(small, test, convnet, protocol=replace(protocol, relabel=labels))

    Args:
        small: the set to label.
        protocol: a `distillkit.training.Protocol` whose `relabel` is a `Relabel` with a teacher.
        epochs: numbers of the epochs whose labels are stored, counted from 0. In an epoch that is not
            listed, training uses the views and labels of a listed epoch, which is drawn at random. Default: all epochs
            of the protocol. `train` with the same generator then gives a network that is bit-identical to one trained
            with the teacher.
        pool: labeled images on which the teacher's accuracy is checked first; see `soft_labels`.
        generator: an int seed, or a CPU generator from which one seed is drawn in the same way as in `train`.
        device: device that computes, or "auto"; results return to the device of `small`. Default: nothing moves.
        precision: "bf16" or "tf32" for faster, less exact products; see `docs/gpu.md`. Default: float32.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: an argument is invalid, the protocol has no teacher, or the teacher's accuracy on the
            pool is not clearly above chance.
    """
    small = cached(open_set(small, name="small", progress=progress))
    relabel = getattr(protocol, "relabel", None)
    if not isinstance(relabel, Relabel) or relabel.teacher is None:
        raise ValueError(
            "protocol must relabel views with a teacher: use Protocol(relabel=Relabel(teacher, ...)), or "
            "PROTOCOLS[...].with_teacher(teacher)"
        )
    images, options = images_of(small), protocol.view_options
    if not len(small):
        raise ValueError("small must hold at least one image, got an empty set")
    chosen = _epochs(range(protocol.num_epochs) if epochs is None else epochs, protocol.num_epochs)
    if pool is not None:
        pool = open_set(pool, name="pool")
        small._empty.require_compatible(pool._empty, names=("small", "pool"))
    try_teacher(relabel.teacher, small if pool is None else pool, name="small" if pool is None else "pool")
    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    kept = min(relabel.top_k or small.num_classes, small.num_classes)
    logits = torch.zeros(len(chosen), len(small), kept, dtype=torch.float16)
    wide = torch.uint8 if small.num_classes <= 256 else torch.int32
    classes = None if kept == small.num_classes else torch.zeros(logits.shape, dtype=wide)
    with bar(len(chosen), "labels", unit="epoch", progress=progress) as shown:
        for at, epoch in enumerate(chosen):
            for view in views(images, options, seed, epoch):
                values, index, _ = relabel.logits(view.images)
                logits[at, view.rows] = values.cpu()
                if classes is not None and index is not None:
                    classes[at, view.rows] = index.cpu().to(wide)
            shown.update()
    made_with = {**_describe(images, options), "teacher": relabel.record()["teacher"]}
    settings = (relabel.mix, relabel.temperature, relabel.scale_loss)
    return StoredLabels(logits, classes, chosen, small.num_classes, *settings, seed, made_with)


def _epochs(epochs: Iterable[int], most: int) -> tuple[int, ...]:
    if not isinstance(epochs, Iterable):
        raise TypeError(f"epochs must be numbers of epochs, as range(0, 300, 10), got {type(epochs).__name__}")
    chosen = sorted({check.positive_int(epoch, "epochs", least=0) for epoch in epochs})
    if not chosen or chosen[-1] >= most:
        raise ValueError(f"epochs must be numbers in [0, {most}), at least one, got {chosen}")
    return tuple(chosen)


def _describe(images: Tensor | StoredImages, options: ViewOptions) -> dict[str, Any]:
    content = images if isinstance(images, Tensor) else images.digests
    return {
        "images": tensor_fingerprint([content]), "batch": options.batch, "augment": stable_repr(options.augment),
        "mix": repr(options.mix),
    }  # fmt: skip
