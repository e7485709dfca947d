"""What one client holds."""

from __future__ import annotations

from dataclasses import dataclass

from distillkit.sets import LabeledImages

__all__ = ["Holding"]


@dataclass(frozen=True)
class Holding:
    """What one client holds: training images, and (optionally) its own test images."""

    train: LabeledImages
    test: LabeledImages | None = None
