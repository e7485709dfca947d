"""What every message that can be inverted must say, and any message that a function replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from distillkit._utils import check

__all__ = ["ObservedMessage", "ReplayableMessage", "require_message"]


class ObservedMessage(Protocol):
    """A message that `invert_message` searches the images of; write one for any message that you can replay.

    Attributes:
        observed: the tensors of the message, as the attacker holds them.
        ordered: whether the message depends on which image stands where, as with several local batches. The attacker
            then tries another order of the labels in each restart.
    """

    observed: tuple[Tensor, ...]
    ordered: bool

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """The message that these images would cause, with a graph to `images`.

        Args:
            images: float [N, C, H, W], in the space in which the client computed.
            labels: int64 [N].

        Returns:
            Tensors of the shapes of `observed`.
        """
        ...

    def count_classes(self, images: Tensor) -> int:
        """How many classes labels may name; also refuses images of a shape that the client cannot have had.

        Args:
            images: noise of the shape that is searched for, float [N, C, H, W].
        """
        ...

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """The labels that the message gives away, int64 [count], sorted.

        Args:
            count: how many images stand behind the message.
            noise: images of the attacker's, float [M, C, H, W], for what it needs of the network's predictions.

        Raises:
            ValueError: the message does not say; labels must be given.
        """
        ...


_PARTS = ("observed", "ordered", "replay", "count_classes", "read_labels")


def require_message(message: object, name: str) -> None:
    """Refuse what is no `ObservedMessage`.

    Args:
        message: what was given.
        name: what it is called in the message.

    Raises:
        TypeError: a part of a message is missing, or it is a class.
    """
    missing = [part for part in _PARTS if not hasattr(message, part)]
    if missing or isinstance(message, type):
        got = f"the class {message.__name__}" if isinstance(message, type) else type(message).__name__
        lacks = f", which has no {', '.join(missing)}" if len(missing) < len(_PARTS) and missing else ""
        raise TypeError(f"{name} must be a ObservedMessage, such as Gradient(network, gradients), got {got}{lacks}")


class ReplayableMessage:
    """Any message that a function makes of images and labels, differentiably. A `ObservedMessage`.

    Args:
        observed: the message, floating tensors.
        replay: `replay(images, labels)`, the same tensors with a graph to the images.
        num_classes: how many classes labels may name.
        ordered: as `ObservedMessage.ordered`.

    Raises:
        TypeError, ValueError: tensors of another kind, not finite or all 0; no such function.
    """

    def __init__(
        self,
        observed: Sequence[Tensor],
        replay: Callable[[Tensor, Tensor], Sequence[Tensor]],
        num_classes: int,
        *,
        ordered: bool = False,
    ) -> None:
        self.observed = _finite(observed)
        self._replay = check.callable_with(replay, "replay", ["images", "labels"], "a function of both")
        self.num_classes = check.positive_int(num_classes, "num_classes", least=2)
        self.ordered = check.boolean(ordered, "ordered")

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """What the function makes of `images` [N, C, H, W] and `labels` [N]."""
        return self._replay(images, labels)

    def count_classes(self, images: Tensor) -> int:
        """`num_classes`, whatever the `images`."""
        return self.num_classes

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Refuses, for any `count` and `noise`: nothing is known of what such a message says of labels."""
        raise ValueError("labels must be given: a message of any kind does not say how labels are read off it")


def _finite(observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
    given = check.sequence(observed, "observed", "tensors")
    for i, one in enumerate(given):
        check.float_tensor(one, f"observed[{i}]")
        if not bool(one.isfinite().all()):
            raise ValueError("observed must be finite, got NaN or Inf")
    if not any(bool(one.any()) for one in given):
        raise ValueError("observed must not be empty or all 0: that says nothing of any image")
    return tuple(one.detach() for one in given)
