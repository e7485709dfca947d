"""Which image of an attack belongs to which true one, and how close they are but for brightness and contrast."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["align", "match"]


def align(images: Tensor, references: Tensor) -> Tensor:
    """Give each image the brightness and contrast that fit its reference best: a x + b by least squares, a >= 0.

    Networks with instance or batch norm hide brightness and contrast from who inverts their gradients, but not the
    picture: a low `psnr` is then no protection. Report `psnr` plain and of the aligned images. This uses the truth, so
    it scores an attack and is no part of one; a constant image is given the reference's mean, so compare with that of
    a guess that knows nothing.

    Args:
        images: what the attack returned, float [N, C, H, W]; any range.
        references: the true image of each, in [0, 1], the same shape.

    Returns:
        Float [N, C, H, W] in [0, 1]: one a and one b an image, over all its channels, then clamped.

    Raises:
        TypeError, ValueError: no batches of images, or shapes that differ.
    """
    x, target = (one.double().flatten(1) for one in _pair(images, references))
    centred = x - x.mean(1, keepdim=True)
    power = centred.square().sum(1, keepdim=True)
    slope = (centred * target).sum(1, keepdim=True) / torch.where(power > 0, power, 1)
    fitted = slope.clamp(min=0) * centred + target.mean(1, keepdim=True)
    return fitted.clamp(0, 1).view_as(images).to(images.dtype)


def match(images: Tensor, references: Tensor) -> Tensor:
    """Pair each true image with one of an attack's, by the assignment with the least total squared distance.

    A gradient of a batch says nothing of the order of its images, so an attack returns them in any. Every image is used
    once; taking the nearest for each reference instead would count one good reconstruction several times.

    Args:
        images: what the attack returned, float [N, C, H, W].
        references: the true images, the same shape, in the same space.

    Returns:
        int64 [N]: `images[match(images, references)]` stand in the order of `references`.

    Raises:
        TypeError, ValueError: no batches of images, or shapes that differ.
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
