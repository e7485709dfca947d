"""Clients made on demand, so that benchmarks do not pay for unused data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distillkit import LabeledImages


class Clients(Sequence[LabeledImages]):
    """Sequence of clients made on demand.

    Args:
        count: how many.
        images: gives those of the client of a number.
    """

    def __init__(self, count: int, images: Callable[[int], LabeledImages]) -> None:
        self.count, self.images = count, images

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> LabeledImages:  # type: ignore[override]
        if not 0 <= number < self.count:
            raise IndexError(number)
        return self.images(number)
