"""Labels of views that a teacher gave once, stored in half precision and replayed without the teacher."""

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
from distillkit._utils.progress import bar
from distillkit.fingerprint import tensor_fingerprint
from distillkit.labels._rows import label_rows
from distillkit.labels._teacher import try_teacher
from distillkit.labels._views import Mixing, ViewOptions, views
from distillkit.labels.mixing import CutMix, Mixup
from distillkit.labels.relabel import Relabel
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, as_set

__all__ = ["StoredLabels", "stored_soft_labels"]

_FORMAT = "distillkit.StoredLabels/1"


class _TrainingViews(Protocol):
    """The part of `distillkit.training.Protocol` that determines the views, which imports this module."""

    @property
    def relabel(self) -> object: ...
    @property
    def view_options(self) -> ViewOptions: ...
    @property
    def num_epochs(self) -> int: ...


@dataclass(frozen=True, eq=False)
class StoredLabels:
    """A teacher's labels for the views of some epochs, made by `stored_soft_labels`.

    Use it as `relabel=` of the protocol that it was made with. An epoch of training whose number is stored is replayed
    as it was; any other epoch replays a stored one, drawn from the seed. The views depend on the stored seed only, so
    all networks see the same views.

    Attributes:
        logits: half precision [E, N, k], minus the largest of each view.
        classes: class of each logit, integer [E, N, k], or None if all K classes are stored in order.
        epochs: numbers of the stored epochs, ascending.
        num_classes: number of classes, K.
        mix: mixing of the views.
        temperature, scale_loss: see `Relabel`; they can be changed with `dataclasses.replace`.
        seed: seed of the views.
        made_with: the options of the views, the images' fingerprint and the teacher, as JSON values. Training with
            other images or options is refused.
    """

    logits: Tensor
    classes: Tensor | None
    epochs: tuple[int, ...]
    num_classes: int
    mix: Mixing | None
    temperature: float
    scale_loss: bool
    seed: int
    made_with: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Number of bytes of the stored logits and classes."""
        return sum(t.numel() * t.element_size() for t in (self.logits, self.classes) if t is not None)

    def save(self, path: str | Path) -> None:
        """Save the labels to a safetensors file.

        Args:
            path: the file.
        """
        tensors = {"logits": self.logits} | ({} if self.classes is None else {"classes": self.classes})
        facts = {
            "epochs": self.epochs, "num_classes": self.num_classes, "temperature": self.temperature,
            "scale_loss": self.scale_loss, "seed": self.seed, "made_with": self.made_with,
            "mix": None if self.mix is None else [type(self.mix).__name__, asdict(self.mix)],
        }  # fmt: skip
        write_tensors(path, tensors, {"format": _FORMAT, "facts": json.dumps(facts)})

    @staticmethod
    def load(path: str | Path) -> StoredLabels:
        """Load labels that `save` wrote.

        Args:
            path: the file.

        Raises:
            ValueError: another kind of file.
        """
        tensors, metadata = read_tensors(path, kind=_FORMAT, what="stored labels")
        facts = json.loads(metadata["facts"])
        facts["epochs"] = tuple(facts["epochs"])
        if facts["mix"] is not None:
            kind, given = facts["mix"]
            facts["mix"] = {"CutMix": CutMix, "Mixup": Mixup}[kind](**given)
        return StoredLabels(tensors["logits"], tensors.get("classes"), **facts)

    def require(self, images: Tensor, classes: int, options: ViewOptions) -> None:
        """Check before training that these are the labels of these images' views.

        Args:
            images: images of the set, float [N, C, H, W].
            classes: number of classes, K.
            options: options of the views.

        Raises:
            ValueError: other images, classes or options.
        """
        now = _describe(images, options)
        for key, was in self.made_with.items():
            if key in now and now[key] != was:
                raise ValueError(
                    f"protocol has stored labels of other views: they were made with {key}={was}, got {now[key]}"
                )
        if classes != self.num_classes:
            raise ValueError(f"protocol has stored labels of {self.num_classes} classes, but the data has {classes}")

    def batches(self, images: Tensor, options: ViewOptions, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the views of one epoch with their stored rows.

        Args:
            images: images of the set, float [N, C, H, W].
            options: options of the views.
            seed: not used, because views have the stored seed.
            epoch: number of the epoch.
        """
        at = self._position(epoch)
        logits, classes = self.logits[at], None if self.classes is None else self.classes[at].to(torch.int64)
        for view in views(images, options, self.seed, self.epochs[at]):
            values = logits[view.rows].to(images.device)
            index = None if classes is None else classes[view.rows].to(images.device)
            yield view.images, label_rows(values, index, self.num_classes, self.temperature, images.dtype)

    def _position(self, epoch: int) -> int:
        if epoch in self.epochs:
            return self.epochs.index(epoch)
        return int(torch.randint(len(self.epochs), (), generator=derive(self.seed, epoch, "stored epoch")))

    def record(self) -> dict[str, Any]:
        """Return the options as JSON values; epochs and logits are given by their number and a fingerprint."""
        tensors = [t for t in (self.logits, self.classes) if t is not None]
        return {
            "stored": tensor_fingerprint(tensors), "epochs": len(self.epochs), "top_k": self.logits.shape[2],
            "bytes": self.bytes, "temperature": self.temperature, "scale_loss": self.scale_loss, "seed": self.seed,
            **self.made_with,
        }  # fmt: skip

    def __repr__(self) -> str:
        epochs, count, k = self.logits.shape
        return f"StoredLabels({epochs} epochs of {count} images, {k} of {self.num_classes} logits, {self.bytes} bytes)"


def stored_soft_labels(
    small: Images,
    protocol: _TrainingViews,
    *,
    epochs: Iterable[int] | None = None,
    pool: Images | None = None,
    generator: int | torch.Generator = 0,
    progress: bool = True,
) -> StoredLabels:
    """Store a teacher's labels for the views of some epochs, so that others can train without the teacher.

    Only logits are stored: `Relabel(top_k=...)` of them for each view, in half precision. The views themselves are a
    pure function of the seed, the epoch and the batch.

        labels = stored_soft_labels(small, protocol, epochs=range(0, 300, 10))
        evaluate(small, test, convnet, protocol=replace(protocol, relabel=labels))

    Args:
        small: the set.
        protocol: a `distillkit.training.Protocol` whose `relabel` is a `Relabel` with a teacher.
        epochs: numbers of the epochs whose labels are stored, from 0. Default: all epochs of the protocol. With all of
            them, `train` with the same generator gives the same network as with the teacher, bit for bit.
        pool: labeled images on which the teacher is tried first; see `soft_labels`.
        generator: an int seed, or a CPU generator from which one seed is drawn, as by `train`.
        progress: whether to show a progress bar.

    Raises:
        TypeError, ValueError: an invalid argument, a protocol without a teacher, or a teacher that is not clearly
            better than chance on the pool.
    """
    small = as_set(small, name="small", progress=progress)
    relabel = getattr(protocol, "relabel", None)
    if not isinstance(relabel, Relabel) or relabel.teacher is None:
        raise ValueError(
            "protocol must relabel views with a teacher: use Protocol(relabel=Relabel(teacher, ...)), or "
            "PROTOCOLS[...].with_teacher(teacher)"
        )
    images, options = small.images, protocol.view_options
    if not len(small):
        raise ValueError("small must hold at least one image, got an empty set")
    relabel.require(images, small.num_classes, options)
    chosen = _epochs(range(protocol.num_epochs) if epochs is None else epochs, protocol.num_epochs)
    if pool is not None:
        small.require_compatible(pool := as_set(pool, name="pool"), names=("small", "pool"))
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
    if isinstance(epochs, type) or not isinstance(epochs, Iterable):
        raise TypeError(f"epochs must be numbers of epochs, as range(0, 300, 10), got {type(epochs).__name__}")
    chosen = sorted({check.positive_int(epoch, "epochs", least=0) for epoch in epochs})
    if not chosen or chosen[-1] >= most:
        raise ValueError(f"epochs must be numbers in [0, {most}), at least one, got {chosen}")
    return tuple(chosen)


def _describe(images: Tensor, options: ViewOptions) -> dict[str, Any]:
    return {
        "images": tensor_fingerprint([images]), "batch": options.batch, "augment": stable_repr(options.augment),
        "mix": repr(options.mix),
    }  # fmt: skip
