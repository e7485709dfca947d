"""Defences, such as noise, that a client applies to a message before sending it, and attacks on defended messages.

The attacker knows the defences, and applies them to the messages of its candidate images.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attacks.inversion._inputs import check_tensors, require_message
from attacks.inversion.observation import ObservedMessage
from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, NonNegative, NonNegativeInt, Positive, Rate
from distillkit.rng import derive


class Defence(Protocol):
    """Interface of defences, which change a message before it is sent: `Clip`, `Noise`, `Sparsify`, or your own class.

    An attacker who knows the defence can take it into account. Therefore every defence also defines the method
    `expected`. It changes the messages that the attacker computes from candidate images, before they are compared with
    the message that the client sent. Ignoring the defence in the attack would overstate the protection.
    """

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the message that the client sends in place of `message`.

        Args:
            message: the message without the defence, tensors of any shapes.
        """
        ...

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `message` with those effects of the defence that an attacker can reproduce.

        The result is differentiable with respect to `message`. The attacker compares it with the sent message
        `observed`.

        Args:
            message: message that the attacker computed from candidate images.
            observed: message that the client sent, after the defence. It may show what the defence did, such as which
                values were set to 0.
        """
        ...


@dataclass(frozen=True)
class Clip(CheckedOptions):
    """Defence that scales a message down to a maximum norm, as DP-SGD and DP-FedAvg do before adding noise.

    A message below the maximum is not changed. An attacker computes the message of candidate images, and clips it to
    the same maximum norm before comparing it with the sent message.

    Args:
        max_norm: largest l2 norm of all tensors together, > 0.

    Raises:
        TypeError, ValueError: `max_norm` is not a positive number.
    """

    max_norm: Positive

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the `message` (tensors), multiplied by max_norm / norm if its l2 norm exceeds `max_norm`."""
        norm = torch.stack([t.square().sum() for t in message]).sum().sqrt()
        factor = self.max_norm / norm.clamp(min=self.max_norm)
        return tuple(factor * t for t in message)

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `message`, clipped to `max_norm`.

        `message` is the message that the attacker computed from candidate images. The sent message `observed` is not
        used.
        """
        return self(message)


@dataclass(frozen=True)
class Noise(CheckedOptions):
    """Defence that adds Gaussian noise to every value of a message. The attacker cannot reproduce the noise.

    Use this defence to measure how well noise protects against inversion attacks. It gives no privacy guarantee: a
    guarantee needs a bound on each record's influence (such as `Clip`), accounting, and a secret source of noise
    (`distillkit.privacy`).

    Args:
        std: standard deviation of the noise, at least 0.
        seed: seed of the noise.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range.
    """

    std: NonNegative
    seed: NonNegativeInt = 0

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the `message` (tensors) plus Gaussian noise."""
        generator = derive(self.seed, "inversion", "noise")
        noisy = (t + self.std * torch.randn(t.shape, generator=generator).to(t) for t in message)
        return tuple(check.finite(t, "the noisy message", "lower std, or clip the message first") for t in noisy)

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `message` unchanged, because an attacker cannot reproduce the noise.

        `message` is the message that the attacker computed from candidate images. The sent message `observed` is not
        used.
        """
        return tuple(message)


@dataclass(frozen=True)
class Sparsify(CheckedOptions):
    """Defence that keeps only the values of largest magnitude in a message, and sends 0 in place of all other values.

    The attacker compares the message of its candidate images with the sent message only in the values that were kept.

    Args:
        share: share of values to keep, among all tensors together, in (0, 1]; their number is rounded up.

    Raises:
        TypeError, ValueError: `share` is not a number in (0, 1].
    """

    share: Rate

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the `message`, in which only the values of largest magnitude are kept; all others are set to 0.

        The kept values are a fraction `share` of the values of all tensors.
        """
        flat = torch.cat([t.flatten() for t in message])
        kept = flat.abs().topk(math.ceil(self.share * len(flat))).indices
        sparse = torch.zeros_like(flat).index_copy(0, kept, flat[kept])
        parts = sparse.split([t.numel() for t in message])
        return tuple(part.view_as(t) for part, t in zip(parts, message))

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `message` with its values set to 0 wherever the sent message `observed` is 0.

        `message` is the message that the attacker computed from candidate images.
        """
        return tuple(t * (s != 0) for t, s in zip(message, observed))


class DefendedMessage:
    """Message to which a client has applied defences that the attacker knows. Implements `ObservedMessage`.

    Args:
        message: the message without defences.
        *defences: defences, applied in this order.

    Attributes:
        observed: the message that is sent, after all defences.

    Raises:
        TypeError: `message` is not an `ObservedMessage`, or an element of `defences` is not a defence.
    """

    def __init__(self, message: ObservedMessage, *defences: Defence) -> None:
        require_message(message, "message")
        for one in defences:
            if not callable(one) or not hasattr(one, "expected") or isinstance(one, type):
                raise TypeError(f"defences must be Defences, such as Clip(1.0), got {type(one).__name__}")
        self.defences, self.ordered = defences, message.ordered
        self.observed = message.observed
        for one in defences:
            self.observed = check_tensors(one(self.observed), f"the result of the defence {type(one).__name__}")
        self._given = message

    @property
    def _message(self) -> ObservedMessage:
        message = copy.copy(self._given)
        message.observed = self.observed  # as it is sent, or divided by the scale of `invert_message`
        return message

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Return the message that the images would give, with the reproducible part of each defence applied to it.

        An attacker can reproduce clipping, for example, but not random noise. Each defence's function `expected`
        computes this part.

        Args:
            images: candidate images, float [N, C, H, W].
            labels: class indices of the images, int64 [N].
        """
        message = self._message.replay(images, labels)
        for one in self.defences:
            message = one.expected(message, self.observed)
        return message

    def count_classes(self, images: Tensor) -> int:
        """Check that images of this shape can produce the message, and return the number of classes K.

        Args:
            images: noise images, with the shape of the images that the attack searches for, float [N, C, H, W].
        """
        return self._message.count_classes(images)

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Infer the labels of the images, int64 [count], from the message that is sent after all defences.

        Args:
            count: number of images from which the message was computed.
            noise: random images, float [M, C, H, W], on which the attacker may evaluate the network.
        """
        return self._message.read_labels(count, noise)
