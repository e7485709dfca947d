"""Corruptions and adversarial attacks that change test images, to measure the robustness of trained networks."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import CheckedOptions, PositiveInt, check_options
from distillkit.normalization import Normalization

__all__ = ["FGSM", "PGD", "Corruption", "Perturbation", "pixels_in_range", "require_perturbations"]

_TOLERANCE = 0.01
"""Largest distance of pixels from [0, 1] that is taken for rounding."""


class Perturbation(ABC):
    """Base class of changes to test images, for `evaluate(..., against=[...])` and `accuracy(..., against=...)`.

    Derive from this class to test another corruption or attack. Implement `__call__`, and let `__str__` return a short
    name. The table of accuracies has a column with this name, so the perturbations of one evaluation must have
    different names.
    """

    @abstractmethod
    def __call__(
        self, pixels: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the changed images. They are clipped to [0, 1] afterwards.

        Args:
            pixels: float [N, C, H, W] in [0, 1], without normalization.
            labels: class indices int [N].
            logits: function of pixels that returns the tested network's logits [N, K]. It normalizes the pixels first.
            generator: CPU generator of all draws. Draw image by image, so that the result does not depend on the
                number of images per call.
        """


def _gaussian_noise(pixels: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return pixels + std * _noise(torch.randn, pixels, generator)


def _shot_noise(pixels: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    drawn = [torch.poisson(photons * image.cpu(), generator) for image in pixels]
    return torch.stack(drawn).to(pixels) / photons


def _gaussian_blur(pixels: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    from kornia.filters import gaussian_blur2d

    sigma *= max(1, min(pixels.shape[2:]) / 32)
    side = 2 * math.ceil(4 * sigma) + 1
    return gaussian_blur2d(pixels, (side, side), (sigma, sigma), border_type="replicate")


def _contrast(pixels: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    mean = pixels.mean((2, 3), keepdim=True)
    return mean + factor * (pixels - mean)


def _brightness(pixels: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    value = pixels.amax(1, keepdim=True)  # hue and saturation stay, so all channels are scaled alike
    brighter = (value + amount).clamp(max=1)
    return torch.where(value > 0, pixels * (brighter / value), brighter)


def _pixelate(pixels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    rows, columns = (_block_means(size, share, pixels) for size in pixels.shape[2:])
    return rows @ pixels @ columns.T


def _block_means(size: int, share: float, like: Tensor) -> Tensor:
    """Return the matrix [size, size] that replaces each of `size` pixels in a line by the mean of its block.

    There are about `share * size` blocks of similar length. A pixel belongs to the block that contains its center. The
    matrix has the same effect as shrinking with a box filter and enlarging again.
    """
    block = ((torch.arange(size) + 0.5) * (int(size * share) / size)).long()
    same = (block[:, None] == block).to(like)
    return same / same.sum(1, keepdim=True)


def _budget(value: float, name: str, above: float | None = None) -> float:
    value = check.real_number(value, name, least=0.0, above=above)
    if value >= 1:
        raise ValueError(
            f"{name} must be below 1, because pixels are in [0, 1], got {value:g}; for a budget in 0..255 pass "
            f"{value:g} / 255"
        )
    return value


Budget = Annotated[float, _budget]
"""Change of a pixel in [0, 1)."""
StepSize = Annotated[float, functools.partial(_budget, above=0.0)]
"""Change of a pixel in (0, 1)."""

CorruptionKind = Literal["gaussian_noise", "shot_noise", "gaussian_blur", "contrast", "brightness", "pixelate"]
_CORRUPTIONS: dict[CorruptionKind, tuple[Callable[[Tensor, float, torch.Generator], Tensor], tuple[float, ...]]] = {
    # hendrycks/robustness@ca36008 ImageNet-C/create_c/make_cifar_c.py
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "gaussian_blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
}
"""Each kind's function, and its amounts at severity 1 to 5."""


@dataclass(frozen=True)
class Corruption(Perturbation):
    """Common corruption of images at a severity, in the style of CIFAR-10-C, for any size and number of channels.

    | kind | amount at severity 1 to 5 |
    |---|---|
    | `"gaussian_noise"` | standard deviation 0.04, 0.06, 0.08, 0.09, 0.10 |
    | `"shot_noise"` | Poisson noise of 500, 250, 100, 75, 50 photons for a white pixel |
    | `"gaussian_blur"` | sigma 0.4, 0.6, 0.7, 0.8, 1 pixels up to size 32; times size / 32 for larger images |
    | `"contrast"` | each pixel's distance from the image's mean is multiplied by 0.75, 0.5, 0.4, 0.3, 0.15 |
    | `"brightness"` | value in HSV plus 0.05, 0.1, 0.15, 0.2, 0.3 |
    | `"pixelate"` | resolution times 0.95, 0.9, 0.85, 0.75, 0.65 |

    Args:
        kind: kind of corruption, see the table.
        severity: severity from 1 to 5; 0 leaves the images unchanged.

    Paper: Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations"
    (ICLR 2019). The amounts are those of the authors' code for CIFAR-10-C. Deviations: the published images of
    CIFAR-10-C are rounded to 8 bits; the results of this class are not. The random noise differs from that in the
    published images. Accuracies are therefore close to those on CIFAR-10-C, but not equal. `load_cifar10c` reads the
    published images.
    """

    kind: CorruptionKind
    severity: int

    def __post_init__(self) -> None:
        check_options(self)
        check.positive_int(self.severity, "severity", least=0, most=5)

    def __call__(
        self, pixels: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the corrupted images; `labels` and `logits` are not used."""
        function, amounts = _CORRUPTIONS[self.kind]
        return function(pixels, amounts[self.severity - 1], generator) if self.severity else pixels

    def __str__(self) -> str:
        return f"{self.kind} {self.severity}"


@dataclass(frozen=True)
class FGSM(Perturbation, CheckedOptions):
    """Attack by one step of size epsilon along the sign of the loss gradient, in the maximum norm of the pixels.

    The attack knows the network and the true labels. A network that resists FGSM may still fail against `PGD`.

    Args:
        epsilon: largest change of a pixel, for pixels in [0, 1]; 8/255 is customary for CIFAR-10.

    Paper: Goodfellow et al., "Explaining and harnessing adversarial examples" (ICLR 2015).
    """

    epsilon: Budget

    def __call__(
        self, pixels: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the perturbed images. The attack is deterministic, so `generator` is not used."""
        return pixels + self.epsilon * _loss_gradient(pixels, labels, logits).sign()

    def __str__(self) -> str:
        return f"FGSM {_in_255ths(self.epsilon)}"


@dataclass(frozen=True)
class PGD(Perturbation, CheckedOptions):
    """Attack by several steps along the sign of the loss gradient, within a distance of epsilon in the maximum norm.

    The attack knows the network and the true labels. After each step, images are projected to the ball around the
    clean image and to [0, 1]. The last iterate is tested.

    Args:
        epsilon: largest change of a pixel, for pixels in [0, 1].
        steps: number of steps.
        step_size: length of a step. Default: `2.5 * epsilon / steps`, which suffices to reach every point of the ball.
        random_start: whether to start at a uniformly random point of the ball, instead of the clean image.

    Paper: Madry et al., "Towards deep learning models resistant to adversarial attacks" (ICLR 2018).
    """

    epsilon: Budget
    steps: PositiveInt = 10
    step_size: StepSize | None = None
    random_start: bool = True

    def __call__(
        self, pixels: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the images, perturbed by the attack.

        If `random_start` is True, `generator` draws the perturbation from which the attack starts.
        """
        size = 2.5 * self.epsilon / self.steps if self.step_size is None else self.step_size
        low, high = (pixels - self.epsilon).clamp(0, 1), (pixels + self.epsilon).clamp(0, 1)
        found = pixels
        if self.random_start:
            start = pixels + self.epsilon * (2 * _noise(torch.rand, pixels, generator) - 1)
            found = start.clamp(low, high)
        for _ in range(self.steps):
            found = (found + size * _loss_gradient(found, labels, logits).sign()).clamp(low, high)
        return found

    def __str__(self) -> str:
        size = "" if self.step_size is None else f" of {_in_255ths(self.step_size)}"
        return f"PGD {_in_255ths(self.epsilon)} {self.steps} steps{size}" + ("" if self.random_start else " from clean")


def _loss_gradient(pixels: Tensor, labels: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of each image's cross-entropy with respect to its pixels."""
    with torch.enable_grad():
        leaf = pixels.detach().requires_grad_()
        loss = F.cross_entropy(logits(leaf), labels, reduction="sum")
        if not loss.requires_grad:
            raise ValueError(
                "network must be differentiable with respect to its images for FGSM and PGD, but its logits have no "
                "gradient; remove torch.no_grad or detach from its forward, or use corruptions only"
            )
        return torch.autograd.grad(loss, leaf)[0]


def _noise(draw: Callable[..., Tensor], pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise of the shape of `pixels`, drawn image by image.

    The noise of an image therefore does not depend on the number of images per call.
    """
    drawn = [draw(pixels.shape[1:], generator=generator, dtype=pixels.dtype) for _ in range(len(pixels))]
    return torch.stack(drawn).to(pixels.device)


def _in_255ths(value: float) -> str:
    return f"{255 * value:.4g}/255"


def pixels_in_range(images: Tensor, normalization: Normalization, name: str = "images") -> Tensor:
    """Return the pixels of normalized images, clipped to [0, 1].

    Args:
        images: float [N, C, H, W], in the normalized space.
        normalization: normalization of the images.
        name: name of the argument, used in error messages.

    Raises:
        TypeError, ValueError: `images` is not a non-empty, finite float tensor [N, C, H, W], or pixels lie
            outside [0, 1] by more than rounding errors.
    """
    check.batch_of_images(images, name)
    Normalization.require(normalization)
    pixels = normalization.decode(images)
    low, high = (float(value) for value in pixels.aminmax())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):
        raise ValueError(
            f"{name} must have pixels in [0, 1] after removing the normalization ({normalization}), got {low:.4g} to "
            f"{high:.4g}; create the set by LabeledImages.from_pixels(pixels, labels, normalization=...)"
        )
    return pixels.clamp(0, 1)


def require_perturbations(against: Sequence[Perturbation]) -> dict[str, Perturbation]:
    """Check the argument `against` of an evaluation, and return the perturbations by name.

    Args:
        against: perturbations with different names.

    Raises:
        TypeError: an item is not a `Perturbation`.
        ValueError: two perturbations have the same name.
    """
    found: dict[str, Perturbation] = {}
    for one in check.sequence(against, "against", "perturbations, such as [FGSM(8 / 255)]"):
        check.instance(one, Perturbation, "against", "a list of perturbations, such as [FGSM(8 / 255)]")
        if str(one) in found:
            raise ValueError(f"against must have perturbations of different names, got {str(one)!r} twice")
        found[str(one)] = one
    return found
