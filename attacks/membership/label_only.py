"""Label-only membership inference, from the decisions of a model on altered copies of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.membership._inputs import decisions
from distillkit._utils import check
from distillkit.rng import as_generator

__all__ = ["label_only"]


def label_only(
    network: nn.Module | Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    *,
    shift: int = 2,
    noise: Sequence[float] = (0.25, 0.5, 1.0, 2.0),
    draws: int = 8,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
) -> Tensor:
    """Return the share of altered copies of each record for which the model's decision is the record's label.

    Use this score against a model that reveals its decisions only. Hiding the confidences is no defence: a model is
    right on more copies of its training records, which lie farther from its decision boundary. The copies are the
    record itself, its translations by at most `shift` pixels, and the record with Gaussian noise of each level. With
    `shift=0` and `noise=()` the score is whether the model is right, the weakest attack, from which others should be
    distinguished. Like other scores, it can be attacked with shadow models: `partial(label_only, network)` is a scorer
    for a `Pipeline`. A record's score does not depend on the other records.

    Args:
        network: classifier that returns logits [n, K] for images, of which only the largest is used, or class indices
            int [n]. A module is in eval mode during the call.
        images: images of the records, float [n, C, H, W], normalized for the network.
        labels: class indices int [n].
        shift: largest translation |dx| + |dy| in pixels; the border is repeated. 2 pixels give 13 copies.
        noise: standard deviations of the noise, in units of the standard deviation of a record's own pixels.
        draws: number of copies for each level of noise. All records receive the same draws.
        generator: an int seed, or a CPU generator, which is advanced.
        chunk: number of images per forward pass; by default chosen by device and size.

    Returns:
        Scores, float64 [n], in [0, 1]; higher for members. Many records may have equal scores.

    Raises:
        TypeError, ValueError: an argument is invalid, or the network returns neither logits nor class indices.

    Paper: Choquette-Choo et al., "Label-only membership inference attacks" (ICML 2021): translations as in section 4.1,
    noise as in section 4.2. Deviations: the score is the share of right decisions, in place of a classifier that is
    trained on the decisions of a shadow model; noise at fixed levels measures the distance to the boundary, in place of
    a search for the boundary.
    """
    if not callable(network) or isinstance(network, type):
        raise TypeError(f"network must be a network, or a function of images, got {type(network).__name__}")
    images = check.batch_of_images(images).detach()
    labels = check.class_labels(labels, len(images), None).to(images.device)
    shift = check.positive_int(shift, "shift", least=0, most=min(images.shape[2:]) - 1)
    levels = check.sequence(noise, "noise", "numbers")
    for number, level in enumerate(levels):
        check.real_number(level, f"noise[{number}]", above=0.0)
    draws = check.positive_int(draws, "draws")
    right, count = torch.zeros(len(images), dtype=torch.float64, device=images.device), 0
    for copies in _copies(images, shift, levels, draws, as_generator(generator)):
        right, count = right + (decisions(network, copies, chunk).to(labels.device) == labels), count + 1
    return right / count


def _copies(
    images: Tensor, shift: int, levels: Sequence[float], draws: int, generator: torch.Generator
) -> Iterator[Tensor]:
    h, w = images.shape[2:]
    wide = F.pad(images, (shift,) * 4, mode="replicate") if shift else images
    for dy in range(-shift, shift + 1):
        for dx in range(abs(dy) - shift, shift - abs(dy) + 1):
            yield wide[:, :, shift + dy : shift + dy + h, shift + dx : shift + dx + w]
    spread = images.flatten(1).std(1, correction=0)[:, None, None, None]
    for level in levels:
        for _ in range(draws):
            drawn = torch.randn(1, *images.shape[1:], generator=generator).to(images)
            yield images + level * spread * drawn
