"""Priors on images for network inversion: total variation, L2 norm, and BatchNorm statistics."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distillkit._utils import check
from distillkit.losses._common import Reduction, reduce, require_float, row_norms

_IMAGES = "N, C, H, W"


def total_variation(images: Tensor, *, order: Literal[1, 2] = 1, reduction: Reduction = "mean") -> Tensor:
    """Compute the anisotropic total variation of each image, a smoothness prior for network inversion.

    The total variation is the sum of the absolute (or squared) differences between each pixel and its right and lower
    neighbors.

    Args:
        images: float [N, C, H, W].
        order: 1 to sum the absolute differences over channels and pixels, or 2 to sum the squared differences.
        reduction: "mean", "sum" or "none" over the images.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: `images` is not a float tensor [N, C, H, W], or an option is unknown.

    Paper: Mahendran and Vedaldi, "Understanding Deep Image Representations by Inverting Them" (CVPR 2015), section 3.
    Deviation: for `order=1`, the paper's formula sums the L2 norm of the two differences of each pixel (isotropic).
    This function sums their absolute values. For the prior of DeepInversion, use `deepinversion_variation`.
    """
    require_float(images, "images", _IMAGES)
    check.one_of(order, "order", (1, 2))
    right = images[..., :, 1:] - images[..., :, :-1]
    down = images[..., 1:, :] - images[..., :-1, :]
    right, down = right.abs().pow(order).flatten(1), down.abs().pow(order).flatten(1)
    return reduce(right.sum(1) + down.sum(1), reduction)


def deepinversion_variation(images: Tensor, *, order: Literal[1, 2] = 2) -> Tensor:
    """Compute DeepInversion's smoothness prior for a batch, from the differences of each pixel to four neighbors.

    The four neighbors of a pixel are the right one, the lower one, and the two diagonal ones in the row below.

    Args:
        images: float [N, C, H, W].
        order: 2 to compute the L2 norm of all differences of the batch for each direction, and return the sum of the
            four norms. This sum grows with the square root of the batch size, so a good weight depends on the batch
            size. 1 to compute the mean absolute difference for each direction, and return the sum of the four means,
            which does not depend on the batch size.

    Returns:
        A scalar.

    Raises:
        TypeError, ValueError: `images` is not a float tensor [N, C, H, W], or `order` is unknown.

    Paper: Yin et al., "Dreaming to Distill" (CVPR 2020), R_TV of Eq. 3, in the form of the authors' code.
    """
    require_float(images, "images", _IMAGES)
    check.one_of(order, "order", (1, 2))
    differences = (
        images[..., :, 1:] - images[..., :, :-1],
        images[..., 1:, :] - images[..., :-1, :],
        images[..., 1:, 1:] - images[..., :-1, :-1],
        images[..., 1:, :-1] - images[..., :-1, 1:],
    )
    if order == 2:
        return torch.stack([row_norms(d.reshape(1, -1)).sum() for d in differences]).sum()
    return torch.stack([d.abs().sum() / max(d.numel(), 1) for d in differences]).sum()


def image_l2(images: Tensor, *, reduction: Literal["mean", "sum", "none", "batch"] = "mean") -> Tensor:
    """Compute the L2 norm (not squared) of each image, a prior for network inversion that favors small pixel values.

    Args:
        images: float [N, C, H, W].
        reduction: "mean", "sum" or "none" over the norms of the images. SRe2L uses the mean. "batch" returns the norm
            of the whole batch, as DeepInversion does on CIFAR; it grows with the square root of the batch size.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: `images` is not a float tensor [N, C, H, W], or `reduction` is unknown.

    Paper: Yin et al., "Dreaming to Distill" (CVPR 2020), R_l2 of Eq. 3.
    """
    require_float(images, "images", _IMAGES)
    if reduction == "batch":
        return row_norms(images.reshape(1, -1)).sum()
    check.one_of(reduction, "reduction", ("mean", "sum", "none", "batch"))
    return reduce(row_norms(images.flatten(1)), reduction)


class BatchNormPrior:
    """Prior for network inversion: the distance of batch statistics from those stored in BatchNorm layers.

        value = sum_l a_l (|mean_l - running_mean_l|_2 + |var_l - running_var_l|_2)

    Here mean_l and var_l are the mean and the biased variance of the input of layer l over the batch and all pixels,
    for each channel. The L2 norms over channels are not squared. The weight a_l is 1, except for the first layer.

    Use the prior as a context manager. It adds hooks to the network, which are removed at the end of the `with` block.

        with BatchNormPrior(network) as prior:
            loss = F.cross_entropy(network(images), labels) + 0.01 * prior.value()

    Args:
        network: network in eval mode, with BatchNorm layers that have running statistics. In training mode, every
            forward pass would change the running statistics.
        first_multiplier: weight a_l of the first layer in the order of `network.modules()`. The paper uses 10 on
            ImageNet.

    Raises:
        TypeError: `network` is not an `nn.Module`.
        ValueError: the network has no BatchNorm layer with running statistics or no values, or `first_multiplier` is
            negative.

    Paper: Yin et al., "Dreaming to Distill" (CVPR 2020), Eq. 4.
    """

    def __init__(self, network: nn.Module, *, first_multiplier: float = 1.0) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be an nn.Module, got {type(network).__name__}")
        check.with_values(network)
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._layers = [m for m in norms if m.running_mean is not None]
        if not self._layers:
            raise ValueError(
                f"network must have a BatchNorm layer with running statistics, but {type(network).__name__} has none; "
                "use a network with BatchNorm, or omit the prior"
            )
        self._first_multiplier = check.real_number(first_multiplier, "first_multiplier", least=0)
        self._handles: list[RemovableHandle] = []
        self._distances: dict[int, Tensor] = {}

    def __enter__(self) -> BatchNormPrior:
        if self._handles:
            raise RuntimeError("this BatchNormPrior is already in use; create another one for a nested block")
        for index, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_pre_hook(partial(self._note, index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._distances.clear()

    def _note(self, index: int, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        var, mean = torch.var_mean(inputs[0], [d for d in range(inputs[0].ndim) if d != 1], correction=0)
        gaps = torch.stack([mean - layer.running_mean, var - layer.running_var])
        weight = 1.0 if index else self._first_multiplier
        self._distances[index] = weight * row_norms(gaps).sum()

    def value(self) -> Tensor:
        """Return the value of the prior for the last forward pass, a scalar that is differentiable in the images.

        Raises:
            RuntimeError: the network has not been called inside the `with` block.
        """
        if not self._distances:
            raise RuntimeError(
                "no forward pass was recorded: call the network inside `with BatchNormPrior(network) as prior:`"
            )
        return torch.stack(list(self._distances.values())).sum()
