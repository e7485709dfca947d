"""What one step reads, in which order images come, and the parts of a local training."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.sets import LabeledImages
from fl._options import PositiveInt, check_options

__all__ = ["Batch", "Phase", "batch_at", "select_rows", "shuffled_indices"]


@dataclass(frozen=True)
class Batch:
    """Images that one step of a local training reads: the client's own, or an add-on's.

    Attributes:
        images: float [B, C, H, W].
        labels: as the task's; an add-on's may be its own (virtual classes count from 0).
        columns: what else belongs to each image, by name, a row each.
        joint: of an add-on's batch: whether it goes through the network together with the real one, so that both share
            batch statistics, or alone.
    """

    images: Tensor
    labels: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    joint: bool = False

    def batch_at(self, index: Tensor) -> Batch:
        """The images at these places, with all that belongs to them; `index` is int64 [m]."""
        columns = {n: c.index_select(0, index) for n, c in self.columns.items()}
        return replace(
            self, images=self.images.index_select(0, index), labels=self.labels.index_select(0, index), columns=columns
        )


@dataclass(frozen=True)
class Phase:
    """One part of a local training: how long it is, and which parameters move in it.

    For `FedAvg(phases=...)`: FedRep, say, trains its classifier in a first phase and all the rest in a second.

    Args:
        epochs: passes over the data; or
        steps: an exact number of steps.
        train: a pattern of parameter names (`"classifier.*"`); "!pattern" means all others.

    Raises:
        TypeError, ValueError: a bad option, or `epochs` beside `steps`.
    """

    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    train: str = "*"

    def __post_init__(self) -> None:
        check_options(self)
        if self.steps is not None and self.epochs != 1:
            raise ValueError(f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}")
        if not isinstance(self.train, str):
            raise TypeError(f"train must be a pattern of parameter names, got {type(self.train).__name__}")

    def trains(self, name: str) -> bool:
        """Whether the parameter called `name` is trained in this phase."""
        return fnmatch.fnmatch(name, self.train.removeprefix("!")) != self.train.startswith("!")


def shuffled_indices(
    count: int, batch: int, generator: torch.Generator, epochs: int, steps: int | None
) -> Iterator[Tensor]:
    """The order in which a training reads its images: for each step the places of the images of its batch.

    Args:
        count: how many images there are.
        batch: how many a step reads; the last batch of a pass is short if they do not divide.
        generator: draws a fresh random order for each pass.
        epochs: how many passes; or
        steps: exactly so many steps, over as many passes as they take. None for `epochs`.

    Yields:
        Places, int64 [batch or fewer].

    Raises:
        TypeError, ValueError: when the first is asked for: numbers out of range, or no generator.
    """
    check.positive_int(count, "count", least=0)
    check.positive_int(batch, "batch")
    check.positive_int(epochs, "epochs", least=0)
    if steps is not None:
        check.positive_int(steps, "steps", least=0)
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    done = 0
    while done < epochs if steps is None else True:
        for index in torch.randperm(count, generator=generator).split(batch):
            if steps is not None:
                if steps == 0:
                    return
                steps -= 1
            yield index
        done += 1


def select_rows(values: Tensor, index: Tensor) -> Tensor:
    """Some rows of a tensor, where it lies; orders are drawn on the CPU, so their places are brought there.

    Args:
        values: [N, ...].
        index: places, integers [m].
    """
    return values.index_select(0, index.to(values.device))


def batch_at(data: LabeledImages, index: Tensor) -> Batch:
    """The images of a set at some places, with their labels and columns, as a batch.

    Args:
        data: the set.
        index: places, int64 [m].
    """
    columns = {name: select_rows(column, index) for name, column in data.columns.items()}
    return Batch(select_rows(data.images, index), select_rows(data.labels, index), columns)
