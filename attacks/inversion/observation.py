"""Interface of messages that can be inverted, and a message that a function computes from images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from attacks.inversion._inputs import check_tensors
from distillkit._utils import check

__all__ = ["ObservedMessage", "ReplayableMessage"]


class ObservedMessage(Protocol):
    """Message that `invert_message` can invert. Implement this protocol for messages computed from images.

    Attributes:
        observed: tensors of the message, as the attacker sees them.
        ordered: whether the message depends on the order of the images, as with several local batches. The attack then
            tries another order of the labels in each restart.
    """

    observed: tuple[Tensor, ...]
    ordered: bool

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Return the message that these images would cause, differentiable with respect to `images`.

        Args:
            images: candidate images, float [N, C, H, W], in the space in which the client computed.
            labels: class indices of the images, int64 [N].

        Returns:
            Tensors with the same shapes as `observed`.
        """
        ...

    def count_classes(self, images: Tensor) -> int:
        """Return the number of classes, after checking that the client could have had images of this shape.

        Args:
            images: noise of the shape to search for, float [N, C, H, W].
        """
        ...

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Infer the labels from the message, int64 [count], sorted.

        Args:
            count: number of images behind the message.
            noise: images of the attacker, float [M, C, H, W], on which it may evaluate the network.

        Raises:
            ValueError: the message does not reveal the labels; they must be given.
        """
        ...


_PARTS = ("observed", "ordered", "replay", "count_classes", "read_labels")


def require_message(message: object, name: str) -> None:
    """Check that a value implements `ObservedMessage`.

    Args:
        message: value to check.
        name: name of the argument, for the error.

    Raises:
        TypeError: a member of the protocol is missing, or the value is a class.
    """
    missing = [part for part in _PARTS if not hasattr(message, part)]
    if missing or isinstance(message, type):
        got = f"the class {message.__name__}" if isinstance(message, type) else type(message).__name__
        lacks = f", which has no {', '.join(missing)}" if len(missing) < len(_PARTS) and missing else ""
        raise TypeError(f"{name} must be an ObservedMessage, such as Gradient(network, gradients), got {got}{lacks}")


class ReplayableMessage:
    """Message that a differentiable function computes from images and labels. Implements `ObservedMessage`.

    Args:
        observed: the message, floating-point tensors.
        replay: function `replay(images, labels)` that returns the message these images would cause, differentiable with
            respect to the images.
        num_classes: number of classes.
        ordered: whether the message depends on the order of the images; see `ObservedMessage`.

    Raises:
        TypeError, ValueError: the tensors have another type, are not finite or are all 0; or `replay` is not a function
            of images and labels.
    """

    def __init__(
        self,
        observed: Sequence[Tensor],
        replay: Callable[[Tensor, Tensor], Sequence[Tensor]],
        num_classes: int,
        *,
        ordered: bool = False,
    ) -> None:
        self.observed = check_tensors(observed, "observed")
        self._replay = check.callable_with(replay, "replay", ["images", "labels"], "a function of both")
        self.num_classes = check.positive_int(num_classes, "num_classes", least=2)
        self.ordered = check.boolean(ordered, "ordered")

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Return the result of the function for `images` [N, C, H, W] and `labels` [N]."""
        return self._replay(images, labels)

    def count_classes(self, images: Tensor) -> int:
        """Return `num_classes` for any `images`."""
        return self.num_classes

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Raise an error for any `count` and `noise`: labels cannot be inferred from an arbitrary message."""
        raise ValueError("labels must be given: they cannot be inferred from an arbitrary message")
