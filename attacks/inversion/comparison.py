"""One attack on several messages about the same images: which defence hides what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attacks.inversion.observation import ObservedMessage, require_message
from attacks.inversion.reconstruction import invert_message
from attacks.matching import align, match
from attacks.metrics import psnr
from distillkit._utils import check
from distillkit.normalization import IDENTITY, Normalization

__all__ = ["MessageComparison", "MessageResult", "compare_messages"]


@dataclass(frozen=True)
class MessageResult:
    """What the attack found in one message.

    Attributes:
        name: of the message.
        psnr: of each private image and the attack's image that was matched to it, in decibels.
        aligned: the same after the best affine change of brightness and contrast, which norm layers hide.
        labels: share of the private labels that were recovered, as counts of each class: in [0, 1].
        loss: of the images returned, which is all that the attacker sees.
    """

    name: str
    psnr: tuple[float, ...]
    aligned: tuple[float, ...]
    labels: float
    loss: float


@dataclass(frozen=True)
class MessageComparison:
    """A row a message; printed, a table in Markdown, means over the images and the greatest in brackets.

    Attributes:
        rows: in the order given.
        guess: mean PSNR of the plain image that fits each private one best, in decibels: what `aligned` gives an attack
            that found nothing.
    """

    rows: tuple[MessageResult, ...]
    guess: float

    def __str__(self) -> str:
        lines = ["| message | PSNR dB (best) | aligned dB (best) | labels % | loss |", "|---|---|---|---|---|"]
        for row in self.rows:
            numbers = (f"{sum(v) / len(v):.1f} ({max(v):.1f})" for v in (row.psnr, row.aligned))
            lines.append(f"| {row.name} | {' | '.join(numbers)} | {100 * row.labels:.0f} | {row.loss:.2g} |")
        return "\n".join([*lines, f"| nothing found | | {self.guess:.1f} | | |"])

    __repr__ = __str__


def compare_messages(
    messages: Mapping[str, ObservedMessage],
    images: Tensor,
    labels: Tensor,
    *,
    normalization: Normalization = IDENTITY,
    **options: Any,
) -> MessageComparison:
    """Attack each message in the same way, and score what comes back against the private images.

    The truth scores; it picks nothing: restarts are chosen by the attack's own loss, and labels are read off the
    messages. One attack that fails is no protection: sweep with other methods, steps, restarts and priors too.

    Args:
        messages: messages by name, of as many images each: `{"none": sent, "clipped": DefendedMessage(sent, Clip(1.0)), "five
            steps": FedAvgUpdate.of(network, images, labels, lr=0.1, epochs=5)}`. Distilled data instead of the private
            images is a message of its own, of as many distilled images.
        images: the private ones, float [N, C, H, W], in the space of the networks.
        labels: theirs, int [N].
        normalization: of that space.
        **options: of `invert_message`, but shape, count and labels.

    Returns:
        A `MessageComparison`.

    Raises:
        TypeError, ValueError: no messages, images or labels that do not fit, and as `invert_message`; the message's name
            is in the note of the error.
    """
    check.mapping(messages, "messages")
    if not messages:
        raise ValueError("messages must hold at least one message, got none")
    for name, message in messages.items():
        require_message(message, f"messages[{name!r}]")
    check.batch_of_images(images)
    if not isinstance(normalization, Normalization):
        raise TypeError(f"normalization must be a Normalization, got {type(normalization).__name__}")
    labels = check.class_labels(labels, len(images), None)
    if fixed := sorted({"shape", "count"} & set(options)):
        raise TypeError(f"options must leave out {', '.join(fixed)}: the images say them")
    truth = normalization.decode(images.detach()).clamp(0, 1)
    rows = []
    for name, message in messages.items():
        try:
            tried = invert_message(message, images.shape[1:], len(images), normalization=normalization, **options)
        except (TypeError, ValueError) as error:
            error.add_note(f"in the message {name!r}")
            raise
        found = tried.images.to(truth)[match(tried.images.to(truth), truth)]
        size = 1 + max(int(labels.max()), int(tried.labels.max()))
        counts = [y.cpu().bincount(minlength=size) for y in (labels, tried.labels)]
        scores = [tuple(psnr(x, truth).tolist()) for x in (found, align(found, truth))]
        share = int(counts[0].minimum(counts[1]).sum()) / len(labels)
        rows.append(MessageResult(name, scores[0], scores[1], share, min(tried.losses)))
    plain = truth.flatten(1).mean(1).view(-1, 1, 1, 1).expand_as(truth)
    return MessageComparison(tuple(rows), float(psnr(plain, truth).mean()))
