"""Interface of messages that can be inverted, and a class that implements it with a function of your choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from attacks.inversion._inputs import check_tensors
from distillkit._utils import check


class ObservedMessage(Protocol):
    """Interface of the messages that `invert_message` can invert. Implement it for your own kind of message.

    Attributes:
        observed: tensors of the message that the attacker has seen.
        ordered: whether the message depends on the order of the images, as it does if a client trains on several
            batches. If true, the attack tries another order of the labels in each restart.
    """

    observed: tuple[Tensor, ...]
    ordered: bool

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Return the message that a client would compute from these images.

        The message is differentiable with respect to `images`.

        Args:
            images: candidate images, float [N, C, H, W], with the client's normalization.
            labels: class indices of the images, int64 [N].

        Returns:
            Tensors with the same shapes as `observed`.
        """
        ...

    def count_classes(self, images: Tensor) -> int:
        """Check that images of this shape can produce the message, and return the number of classes K.

        Args:
            images: noise images, with the shape of the images that the attack searches for, float [N, C, H, W].
        """
        ...

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Infer the labels from the message, int64 [count], sorted.

        Args:
            count: number of images from which the message was computed.
            noise: random images, float [M, C, H, W], on which the attacker may evaluate the network.

        Raises:
            ValueError: the message does not reveal the labels, so the user must pass them to the attack.
        """
        ...


class ReplayableMessage:
    """Message that is computed by a differentiable function of images and labels. Implements `ObservedMessage`.

    Args:
        observed: tensors of the message that the attacker has seen, of a floating-point type.
        replay: function `replay(images, labels)` that returns the message for these records, differentiable with
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
        """Return the result of the constructor's argument `replay` for `images` [N, C, H, W] and `labels` [N]."""
        return self._replay(images, labels)

    def count_classes(self, images: Tensor) -> int:
        """Return the constructor's argument `num_classes`. The `images` are not checked."""
        return self.num_classes

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Raise ValueError, because labels cannot be inferred from an arbitrary message; pass them to the attack.

        Args:
            count, noise: not used.
        """
        raise ValueError("labels must be given: they cannot be inferred from an arbitrary message")
