"""Batches of images, their random order, and the phases of local training."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.batches import batch_indices
from distillkit._utils.options import CheckedOptions, PositiveInt, check_options
from distillkit.sets import LabeledImages


@dataclass(frozen=True)
class Batch(CheckedOptions):
    """Images for one step of local training: the client's own images, or an add-on's.

    Attributes:
        images: float [B, C, H, W].
        labels: labels of the images, in the form that the task needs. If an add-on's batch has classes of its own, the
            labels may be indices of these classes, from 0.
        columns: additional values of each image, by name, one row per image.
        joint: for an add-on's batch, whether it is concatenated with the client's batch in the forward pass, so that
            both share batch-norm statistics. If False, the add-on's batch has a forward pass of its own.

    Raises:
        TypeError: a value has another type.
    """

    images: Tensor
    labels: Tensor
    columns: Annotated[dict[str, Tensor], check.mapping] = field(default_factory=dict)
    joint: bool = False


@dataclass(frozen=True)
class Phase:
    """One phase of local training: its length, and the parameters that it trains.

    Pass the phases to `FedAvg(phases=...)`. FedRep, for example, trains its classifier in a first phase and all other
    parameters in a second.

    Args:
        epochs: number of passes over the data.
        steps: exact number of optimizer steps. Set it instead of `epochs`.
        train: pattern of the names of the trained parameters, such as "classifier.*". A leading "!" negates the
            pattern: "!classifier.*" trains all parameters that "classifier.*" does not match.

    Raises:
        TypeError, ValueError: an option is out of range, or both `epochs` and `steps` are given.
    """

    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    train: str = "*"

    def __post_init__(self) -> None:
        check_options(self)
        if self.steps is not None and self.epochs != 1:
            raise ValueError(f"give epochs or steps, not both: got epochs={self.epochs}, steps={self.steps}")

    def trains(self, name: str) -> bool:
        """Return whether this phase trains the parameter called `name`."""
        return fnmatch.fnmatch(name, self.train.removeprefix("!")) != self.train.startswith("!")


def shuffled_indices(
    count: int, batch: int, generator: torch.Generator, epochs: int, steps: int | None,
    merge_single: bool = False, like: Tensor | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the image indices of one batch after another, with a new random order for each pass over the set.

    Args:
        count: number of images.
        batch: images per step; the last batch of a pass may be smaller.
        generator: source of a new random order for each pass.
        epochs: number of passes. It is used only if `steps` is None.
        steps: exact number of batches, in as many passes as needed; the last pass may be incomplete.
        merge_single: whether a last batch of one image is merged into the batch before it. Set it for a network with
            batch norm, which cannot normalize single values.
        like: tensor to whose device the order of each pass is moved. Default: indices on the CPU.

    Yields:
        Indices, int64 [batch or fewer; batch + 1 if the last batch was merged].

    Raises:
        TypeError, ValueError: a number is out of range, or `generator` is not a generator; raised when the first batch
            is requested.
    """
    check.positive_int(count, "count", least=0)
    check.positive_int(batch, "batch")
    check.positive_int(epochs, "epochs", least=0)
    check.boolean(merge_single, "merge_single")
    if steps is not None:
        check.positive_int(steps, "steps", least=0)
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    done = 0
    while done < epochs if steps is None else True:
        order = torch.randperm(count, generator=generator)
        order = order if like is None else order.to(like.device, non_blocking=True)
        for index in batch_indices(order, batch, merge_single=merge_single):
            if steps is not None:
                if steps == 0:
                    return
                steps -= 1
            yield index
        done += 1


def select_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a tensor at some indices. The result is on the tensor's device.

    Args:
        values: tensor [N, ...].
        index: row indices, int64 [m], on any device.
    """
    return values.index_select(0, index.to(values.device, non_blocking=True))


def batch_at(data: LabeledImages, index: Tensor) -> Batch:
    """Return the images of a set at some indices, with their labels and additional columns, as a batch.

    Args:
        data: set to read. Its `columns` hold further values of each image.
        index: image indices, int64 [m].
    """
    columns = {name: select_rows(column, index) for name, column in data.columns.items()}
    return Batch(select_rows(data.images, index), select_rows(data.labels, index), columns)
