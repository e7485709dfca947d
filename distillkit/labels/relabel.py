"""Soft labels from a teacher for every augmented and mixed version (view) of an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from distillkit._utils.options import PositiveInt, Temperature, check_options
from distillkit.labels._rows import label_rows, stored_logits
from distillkit.labels._teacher import describe_teacher, teacher_logits
from distillkit.labels._views import Mixing, ViewOptions, require_mixing, views
from distillkit.sets._stored import StoredImages


@dataclass(frozen=True)
class Relabel:
    """Soft labels that a teacher computes for each training batch after augmentation and mixing (SRe2L, RDED).

    Use it as `Protocol(relabel=Relabel(teacher, temperature=20, mix=CutMix()))`. The labels of the set are then
    ignored. The loss of a batch is KL(teacher || student) between the softmax outputs at the temperature, averaged over
    the batch.

    The largest logit of each image is subtracted from the teacher's logits, which are then rounded to half precision.
    `stored_soft_labels` stores exactly these numbers, so training with stored labels gives bit-identical results.

    Args:
        teacher: network that was trained on the same classes, with the same normalization. It runs in eval mode and is
            not changed. It is None in the published protocols `PROTOCOLS`; use `Protocol.with_teacher` to set it.
        temperature: temperature T > 0 of the teacher and the student. RDED uses 20 with CutMix and 4 with Mixup.
        mix: mixing of every batch, `CutMix()`, `Mixup()` or None. The teacher labels the mixed images.
        top_k: number of largest logits that are used. All other classes get probability 0. Default: all logits are
            used.
        scale_loss: whether to multiply the loss by T^2 (Hinton et al., 2015). The papers omit this factor, so their
            gradients are about T^2 times smaller. This affects SGD, but not AdamW.
        path: file from which the teacher was loaded. It has no effect on training; `record` returns it, so that the
            description of a run states where the teacher comes from.

    Papers: Yin et al., "Squeeze, Recover and Relabel" (NeurIPS 2023), section 3.3; Sun et al., "On the Diversity and
    Realism of Distilled Dataset" (CVPR 2024), section 4.
    """

    teacher: nn.Module | None
    temperature: Temperature = 20.0
    mix: Mixing | None = None
    top_k: PositiveInt | None = None
    scale_loss: bool = False
    path: str | None = None

    def __post_init__(self) -> None:
        check_options(self)
        require_mixing(self.mix)

    def require(self, images: Tensor | StoredImages, classes: int, options: ViewOptions) -> None:
        """Check before training that there is a teacher. (`try_teacher` checks whether it fits the data.)

        Args:
            images, classes, options: not used; `StoredLabels.require` has the same arguments.

        Raises:
            ValueError: `teacher` is None.
        """
        if self.teacher is None:
            raise ValueError("protocol must have a teacher to relabel: use PROTOCOLS[...].with_teacher(teacher)")

    def batches(
        self, images: Tensor | StoredImages, options: ViewOptions, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of augmented images ("views") of one epoch, each with the teacher's soft labels.

        Args:
            images: images of the set, float [N, C, H, W], or the set if it is stored.
            options: batch size, augmentation and mixing of the views.
            seed, epoch: seed, and number of the epoch, which determine the views.
        """
        assert self.teacher is not None
        for view in views(images, options, seed, epoch):
            values, index, classes = self.logits(view.images, step=True)
            yield view.images, label_rows(values, index, classes, self.temperature, view.images.dtype)

    def logits(self, images: Tensor, *, step: bool = False) -> tuple[Tensor, Tensor | None, int]:
        """Return the teacher's logits in half precision, the class index of each logit, and the number of classes.

        For each image, only the `top_k` largest logits are returned. If all logits are returned, the class indices are
        None.

        Args:
            images: float [N, C, H, W].
            step: as in `teacher_logits`.
        """
        assert self.teacher is not None
        logits = teacher_logits(self.teacher, images, step=step)
        return *stored_logits(logits, self.top_k), logits.shape[1]

    def record(self) -> dict[str, Any]:
        """Return the options as JSON values, with the teacher's class name (a Python class), fingerprint and path."""
        teacher = None if self.teacher is None else {**describe_teacher(self.teacher), "path": self.path}
        mix = None if self.mix is None else repr(self.mix)
        return {
            "teacher": teacher, "temperature": self.temperature, "mix": mix, "top_k": self.top_k,
            "scale_loss": self.scale_loss,
        }  # fmt: skip

    def without_teacher(self) -> Relabel:
        """Return a copy without the teacher."""
        return replace(self, teacher=None, path=None)

    def __repr__(self) -> str:
        teacher = None if self.teacher is None else type(self.teacher).__name__
        top = "" if self.top_k is None else f", top_k={self.top_k}"
        scaled = ", scale_loss=True" if self.scale_loss else ""
        return f"Relabel({teacher}, temperature={self.temperature:g}, mix={self.mix}{top}{scaled})"
