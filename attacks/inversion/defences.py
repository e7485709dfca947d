"""What a client can do to a message before it sends it, and what an attacker who knows of it does in turn."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attacks.inversion.observation import ObservedMessage, require_message
from distillkit._utils import check
from distillkit.rng import derive

__all__ = ["Clip", "Defence", "DefendedMessage", "Noise", "Sparsify"]


class Defence(Protocol):
    """A function of a message to the message that is sent instead; `Clip`, `Noise`, `Sparsify`, or one of your own.

    An attack that does not know of a defence flatters it, so every defence says what is known of it.
    """

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What is sent instead.

        Args:
            message: tensors of any shapes.
        """
        ...

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the attacker expects to see of a message that it replays, differentiably.

        Args:
            message: the replay.
            observed: what was sent.
        """
        ...


@dataclass(frozen=True)
class Clip:
    """Scale the whole message down to a norm, if it is longer: what DP-SGD and clipped updates do before the noise.

    The attacker clips its replays alike.

    Args:
        max_norm: the greatest l2 norm of all tensors together, > 0.

    Raises:
        TypeError, ValueError: another norm.
    """

    max_norm: float

    def __post_init__(self) -> None:
        check.real_number(self.max_norm, "max_norm", above=0)

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The `message`, times max_norm / norm where that is below 1."""
        norm = torch.stack([t.square().sum() for t in message]).sum().sqrt()
        factor = self.max_norm / norm.clamp(min=self.max_norm)
        return tuple(factor * t for t in message)

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The replayed `message`, clipped alike; `observed` is not needed."""
        return self(message)


@dataclass(frozen=True)
class Noise:
    """Add Gaussian noise to every entry. Nobody can replay it.

    This measures what noise of a size hides from these attacks. It is no guarantee: that needs a bound on what a record
    can change, as `Clip` before it gives, accounting, and a secret source (`distillkit.privacy`).

    Args:
        std: standard deviation, at least 0.
        seed: of the noise.

    Raises:
        TypeError, ValueError: options out of range.
    """

    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        check.real_number(self.std, "std", least=0)
        check.positive_int(self.seed, "seed", least=0)

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The `message` plus noise."""
        generator = derive(self.seed, "inversion", "noise")
        return tuple(t + self.std * torch.randn(t.shape, generator=generator).to(t) for t in message)

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The replayed `message` as it is; `observed` is not needed."""
        return tuple(message)


@dataclass(frozen=True)
class Sparsify:
    """Send the entries of greatest magnitude, 0 for the rest. The attacker sees which, and compares those alone.

    Args:
        share: of the entries of all tensors together, in (0, 1], rounded up to whole ones.

    Raises:
        TypeError, ValueError: another share.
    """

    share: float

    def __post_init__(self) -> None:
        check.real_number(self.share, "share", above=0, most=1)

    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The `message` with all but its greatest entries set to 0."""
        flat = torch.cat([t.flatten() for t in message])
        kept = flat.abs().topk(math.ceil(self.share * len(flat))).indices
        sparse = torch.zeros_like(flat).index_copy(0, kept, flat[kept])
        parts = sparse.split([t.numel() for t in message])
        return tuple(part.view_as(t) for part, t in zip(parts, message))

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The replayed `message` where `observed` is not 0."""
        return tuple(t * (s != 0) for t, s in zip(message, observed))


class DefendedMessage:
    """A message that defends its message. A `ObservedMessage`, whose replays are what an attacker who knows the defences expects.

    Args:
        message: whose message is clean.
        *defences: applied one after the other.

    Attributes:
        observed: what is sent.

    Raises:
        TypeError: no message, or no defences.
    """

    def __init__(self, message: ObservedMessage, *defences: Defence) -> None:
        require_message(message, "message")
        for one in defences:
            if not callable(one) or not hasattr(one, "expected") or isinstance(one, type):
                raise TypeError(f"defences must be Defences, such as Clip(1.0), got {type(one).__name__}")
        self.defences, self.ordered = defences, message.ordered
        self.observed = message.observed
        for one in defences:
            self.observed = tuple(t.detach() for t in one(self.observed))
        self._message = copy.copy(message)
        self._message.observed = self.observed  # labels are read off what was sent

    def replay(self, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """What the attacker expects of `images` [N, C, H, W] with `labels` [N], behind the defences."""
        message = self._message.replay(images, labels)
        for one in self.defences:
            message = one.expected(message, self.observed)
        return message

    def count_classes(self, images: Tensor) -> int:
        """As the message without defences, which may refuse `images` [N, C, H, W]."""
        return self._message.count_classes(images)

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """As the message without defences (of its `count` and `noise`), from what was sent."""
        return self._message.read_labels(count, noise)
