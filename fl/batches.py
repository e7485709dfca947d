"""What one step reads, in which order images come, and the parts of a local training."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from distillkit import check
from distillkit.sets import LabeledImages

__all__ = ["Batch", "Phase", "rows", "shuffled"]


@dataclass(frozen=True)
class Batch:
    """Images that one step reads.

    Attributes:
        images: float [B, C, H, W].
        labels: as the task's; an add-on's may be its own (virtual classes count from 0).
        columns: what else belongs to each image.
        joint: forwarded together with the real batch (shared batch statistics), or alone.
    """

    images: Tensor
    labels: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    joint: bool = False

    def rows(self, index: Tensor) -> Batch:
        """Some of the images, with all that belongs to them."""
        columns = {n: c.index_select(0, index) for n, c in self.columns.items()}
        return replace(
            self, images=self.images.index_select(0, index), labels=self.labels.index_select(0, index), columns=columns
        )


@dataclass(frozen=True)
class Phase:
    """One part of a local training: passes over the data (or a number of steps), and which parameters move.

    `train` is a pattern of parameter names; "!pattern" means all others.

    Raises:
        TypeError, ValueError: a bad option, or `epochs` beside `steps`.
    """

    epochs: int = 1
    steps: int | None = None
    train: str = "*"

    def __post_init__(self) -> None:
        check.positive_int(self.epochs, "epochs")
        if self.steps is not None:
            check.positive_int(self.steps, "steps")
            if self.epochs != 1:
                raise ValueError(f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}")
        if not isinstance(self.train, str):
            raise TypeError(f"train must be a pattern of parameter names, got {type(self.train).__name__}")

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained in this phase."""
        return fnmatch.fnmatch(name, self.train.removeprefix("!")) != self.train.startswith("!")


def shuffled(count: int, batch: int, generator: torch.Generator, epochs: int, steps: int | None) -> Iterator[Tensor]:
    """Index tensors: whole passes in fresh random orders, the last short batch kept; or exactly `steps` of them."""
    done = 0
    while done < epochs if steps is None else True:
        for index in torch.randperm(count, generator=generator).split(batch):
            if steps is not None:
                if steps == 0:
                    return
                steps -= 1
            yield index
        done += 1


def rows(data: LabeledImages, index: Tensor, device: torch.device) -> Batch:
    """Some images of a set as a batch on a device."""

    def taken(column: Tensor) -> Tensor:
        return column.index_select(0, index.to(column.device)).to(device)

    return Batch(taken(data.images), taken(data.labels), {n: taken(c) for n, c in data.columns.items()})
