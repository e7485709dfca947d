"""What one client holds."""

from __future__ import annotations

from dataclasses import dataclass

from distillkit.sets import LabeledImages, StoredImages

__all__ = ["ClientData"]


@dataclass(frozen=True)
class ClientData:
    """What one client holds, for `simulate(method, [ClientData(train, test), ...])`.

    Attributes:
        train: its training images. Those of a `StoredImages` are read when the client is asked, and then let go.
        test: its own test images, if it has some.
    """

    train: LabeledImages | StoredImages
    test: LabeledImages | StoredImages | None = None

    @property
    def stored(self) -> bool:
        """Whether any of it lies in a file."""
        return isinstance(self.train, StoredImages) or isinstance(self.test, StoredImages)

    def read(self) -> tuple[LabeledImages, LabeledImages | None]:
        """The client's training and test images, in memory."""
        return _read(self.train), None if self.test is None else _read(self.test)


def _read(data: LabeledImages | StoredImages) -> LabeledImages:
    return data.read() if isinstance(data, StoredImages) else data
