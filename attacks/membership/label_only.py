"""Label-only membership inference, which uses only the classes that a model predicts for altered copies of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.membership._inputs import decisions, require_network
from distillkit._utils import check
from distillkit.rng import as_generator
from distillkit.sets._devices import on_device


@on_device()
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
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the share of altered copies of each record that the model classifies correctly, as a membership score.

    Use this score against a model that reveals only its decisions, and not its confidences. A model is right on more
    copies of its training records, because they lie farther from its decision boundary. The copies are the record
    itself, its translations by at most `shift` pixels, and the record with Gaussian noise of each level in `noise`.

    With `shift=0` and `noise=()`, the score only says whether the model is right about the record. This is the weakest
    attack, and a baseline for all others. You can also use the score with shadow models: let the function `fit` of a
    `Pipeline` return `partial(label_only, network)` as a scorer, where `network` is the network that this call of `fit`
    has trained. The score of a record does not depend on the other records in the call.

    Args:
        network: classifier that returns class indices, int [n], or logits [n, K], of which only the position of the
            largest is used. A module is in eval mode during the call.
        images: images of the records, float [n, C, H, W], normalized for the network.
        labels: class indices int [n].
        shift: largest translation |dx| + |dy| in pixels; pixels at the border are repeated. 2 pixels give 13 copies.
        noise: standard deviations of the noise, in units of the standard deviation of a record's own pixels.
        draws: number of copies for each level of noise. All records receive the same noise.
        generator: seed of the noise, or a CPU generator, whose state is advanced.
        chunk: number of images per forward pass; by default, it depends on the device and on the size of an image.
        device: device that computes, or "auto"; results return to the device of `network`. Default: nothing moves.

    Returns:
        Scores, float64 [n], in [0, 1]; higher for members. Many records may have equal scores.

    Raises:
        TypeError, ValueError: an argument is invalid, or the network returns NaN, or neither logits of at least two
            classes nor class indices.

    Paper: Choquette-Choo et al., "Label-only membership inference attacks" (ICML 2021), with translations as in section
    4.1 and noise as in section 4.2. Deviations: our score is the share of right decisions, where the paper trains a
    classifier on the decisions of a shadow model. We use noise at fixed levels to measure the distance to the decision
    boundary, and do not search for the boundary.
    """
    require_network(network)
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
