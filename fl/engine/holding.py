"""What one client holds."""

from __future__ import annotations

from dataclasses import dataclass

from distillkit.sets import LabeledImages

__all__ = ["Holding"]


@dataclass(frozen=True)
class Holding:
    """What one client holds, for `simulate(method, [Holding(train, test), ...])`.

    Attributes:
        train: its training images.
        test: its own test images, if it has some.
    """

    train: LabeledImages
    test: LabeledImages | None = None
