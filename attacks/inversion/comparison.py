"""Comparison of one attack's results on several messages that are computed from the same images.

For example, one message has noise, and the other one has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attacks.inversion._inputs import require_message
from attacks.inversion.observation import ObservedMessage
from attacks.inversion.reconstruction import invert_message
from attacks.matching import align, match
from attacks.metrics import psnr
from distillkit._utils import check
from distillkit._utils.tables import markdown_table
from distillkit.normalization import IDENTITY, Normalization


@dataclass(frozen=True)
class MessageResult:
    """Result of the attack on one message.

    Attributes:
        name: name of the message.
        psnr: PSNR in decibels between each private image and the reconstruction that is matched to it.
        aligned: PSNR in decibels after the reconstruction's brightness and contrast were fitted to the private image
            (see `attacks.align`). Networks with instance or batch norm hide brightness and contrast from the attack.
        labels: share of the private labels that were recovered, in [0, 1]. Only the number of images per class counts,
            and not the order of the labels.
        loss: loss of the attack for the returned images. This is the only result that an attacker can compute without
            the private images.
    """

    name: str
    psnr: tuple[float, ...]
    aligned: tuple[float, ...]
    labels: float
    loss: float


@dataclass(frozen=True)
class MessageComparison:
    """Results of one attack on several messages. They print as a Markdown table, with means over each message's images.

    The table gives the result for the best image in brackets.

    Attributes:
        rows: one result per message, in the order in which the messages were given.
        guess: mean PSNR in decibels between each private image and the constant image that is closest to it. If the
            mean of a message's `aligned` values is near this value, the attack found nothing.
    """

    rows: tuple[MessageResult, ...]
    guess: float

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            numbers = (f"{sum(v) / len(v):.1f} ({max(v):.1f})" for v in (row.psnr, row.aligned))
            rows.append((row.name, *numbers, f"{100 * row.labels:.0f}", f"{row.loss:.2g}"))
        rows.append(("nothing found", "", f"{self.guess:.1f}", "", ""))
        return markdown_table(("message", "PSNR dB (best)", "aligned dB (best)", "labels %", "loss"), rows)

    __repr__ = __str__


def compare_messages(
    messages: Mapping[str, ObservedMessage],
    images: Tensor,
    labels: Tensor,
    *,
    normalization: Normalization = IDENTITY,
    **options: Any,
) -> MessageComparison:
    """Run the same attack on each message, and score the reconstructions against the private images.

    The private images are used for scoring only: the best restart is chosen by the loss of the attack, and labels are
    inferred from the messages. A failed attack does not prove protection, so also try other methods, steps, restarts
    and priors.

    Args:
        messages: messages by name, each computed from as many images as `images` has: `{"none": sent, "clipped":
            DefendedMessage(sent, Clip(1.0)), "five steps": FedAvgUpdate.of(network, images, labels, lr=0.1,
            epochs=5)}`. To attack distilled data, pass a message that was computed
            from equally many distilled images.
        images: the private images, float [N, C, H, W], normalized for the network.
        labels: labels of the private images, int [N].
        normalization: normalization of `images`.
        **options: options of `invert_message`, except shape, count and labels.

    Returns:
        The result for each message.

    Raises:
        TypeError, ValueError: there are no messages, or the images or labels are invalid. Errors of `invert_message`
            are raised with a note that names the message.
    """
    for name, message in check.mapping(messages, "messages").items():
        require_message(message, f"messages[{name!r}]")
    if not messages:
        raise ValueError("messages must hold at least one message, got none")
    check.batch_of_images(images)
    check.instance(normalization, Normalization, "normalization", "a Normalization")
    labels = check.class_labels(labels, len(images), None)
    if fixed := sorted({"shape", "count"} & set(options)):
        raise TypeError(f"options must not include {', '.join(fixed)}, which the images determine")
    truth = normalization.decode(images.detach())
    low, high = float(truth.min()), float(truth.max())
    if low < -0.01 or high > 1.01:
        raise ValueError(
            f"images must be pixels in [0, 1] in their normalization, got {low:.3g} to {high:.3g} with "
            f"normalization={normalization!r}; pass the normalization of the images"
        )
    truth = truth.clamp(0, 1)
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
