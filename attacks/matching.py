"""Pairing of reconstructed images with true images, and alignment of brightness and contrast, to score attacks."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["align", "match"]


def align(images: Tensor, references: Tensor) -> Tensor:
    """Change the brightness and contrast of each image so that it fits its reference best.

    An image x becomes a x + b, with a >= 0 and b by least squares. Networks with instance or batch norm hide brightness
    and contrast from gradient inversion, but not the image content. A low `psnr` then does not mean protection, so
    report `psnr` both with and without alignment. Alignment uses the true images, so use it only to score an attack.
    Alignment gives even a constant image the mean of its reference. Therefore compare the attack's score after
    alignment with the score of constant images.

    Args:
        images: images from the attack, float [N, C, H, W], in any range.
        references: corresponding true images in [0, 1], of the same shape.

    Returns:
        Aligned images, float [N, C, H, W], clamped to [0, 1]. Each image has one a and one b for all channels.

    Raises:
        TypeError, ValueError: an argument is not a batch of images, the shapes differ, or `references` has pixels
            outside [0, 1].
    """
    x, target = (one.double().flatten(1) for one in _pair(images, references))
    low, high = (float(v) for v in target.aminmax())
    if low < -0.01 or high > 1.01:
        raise ValueError(
            f"references must be pixels in [0, 1], got {low:.3g} to {high:.3g}; decode their normalization"
        )
    centred = x - x.mean(1, keepdim=True)
    power = centred.square().sum(1, keepdim=True)
    slope = (centred * target).sum(1, keepdim=True) / torch.where(power > 0, power, 1)
    fitted = slope.clamp(min=0) * centred + target.mean(1, keepdim=True)
    return fitted.clamp(0, 1).view_as(images).to(images.dtype)


def match(images: Tensor, references: Tensor) -> Tensor:
    """Pair each true image with one of the attack's images so that the total squared distance is minimal.

    A batch's gradient does not contain the order of its images, so an attack returns them in arbitrary order. Every
    image is used once. Choosing the nearest image for each reference instead could count one good reconstruction
    several times.

    Args:
        images: images from the attack, float [N, C, H, W].
        references: true images, of the same shape and in the same space.

    Returns:
        Indices into `images`, int64 [N]: `images[match(images, references)]` is in the order of `references`.

    Raises:
        TypeError, ValueError: an argument is not a batch of images, or the shapes differ.
    """
    x, target = (one.detach().double().flatten(1) for one in _pair(images, references))
    from scipy.optimize import linear_sum_assignment

    distances = torch.cdist(target, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.as_tensor(linear_sum_assignment(distances.cpu().numpy())[1], device=images.device)


def _pair(images: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    check.batch_of_images(images, "images")
    check.batch_of_images(references, "references")
    if images.shape != references.shape:
        raise ValueError(
            f"images and references must have the same shape, got {list(images.shape)} and {list(references.shape)}"
        )
    return images, references.to(images.device)
