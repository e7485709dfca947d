"""Image priors for inversion: total variation, L2 norm, and BatchNorm statistics."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distillkit._utils import check
from distillkit.losses._common import Reduction, reduce, require_float, row_norms

__all__ = ["BatchNormPrior", "deepinversion_variation", "image_l2", "total_variation"]

_IMAGES = "N, C, H, W"


def total_variation(images: Tensor, *, order: Literal[1, 2] = 1, reduction: Reduction = "mean") -> Tensor:
    """Compute the anisotropic total variation of each image, a smoothness prior for inversion.

    The total variation is the sum of the differences between each pixel and its right and lower neighbors.

    Args:
        images: float [N, C, H, W].
        order: 1 to sum absolute differences over channels and pixels, 2 to sum squared differences.
        reduction: "mean", "sum" or "none" over the images. The mean does not grow with the batch.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: invalid images, or options out of range.

    Paper: Mahendran and Vedaldi, "Understanding Deep Image Representations by Inverting Them" (CVPR 2015), the finite
    differences of Section 3, summed separately for the two directions. For the prior of DeepInversion, see
    `deepinversion_variation`.
    """
    require_float(images, "images", _IMAGES)
    check.one_of(order, "order", (1, 2))
    right = images[..., :, 1:] - images[..., :, :-1]
    down = images[..., 1:, :] - images[..., :-1, :]
    right, down = right.abs().pow(order).flatten(1), down.abs().pow(order).flatten(1)
    return reduce(right.sum(1) + down.sum(1), reduction)


def deepinversion_variation(images: Tensor, *, order: Literal[1, 2] = 2) -> Tensor:
    """Compute DeepInversion's smoothness prior from the differences of each pixel to four neighbors, for a whole batch.

    The neighbors of a pixel are the right one, the lower one and the two lower diagonal ones.

    Args:
        images: float [N, C, H, W].
        order: 2 for the sum, over the four directions, of the L2 norm of *all* differences in the batch. This sum grows
            with the square root of the batch size, so the right weight depends on the batch size. 1 for the sum of four
            mean absolute differences, one per direction, which does not grow.

    Returns:
        A scalar.

    Raises:
        TypeError, ValueError: invalid images, or an unknown order.

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
    """Compute the L2 norm (not squared) of each image, a prior for inversion that favors small pixel values.

    Args:
        images: float [N, C, H, W].
        reduction: "mean", "sum" or "none" over the images' norms (SRe2L uses the mean); "batch" is the norm of the
            whole batch (DeepInversion on CIFAR), which grows with the square root of the batch size.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: invalid images, or an unknown reduction.

    Paper: Yin et al., "Dreaming to Distill" (CVPR 2020), R_l2 of Eq. 3.
    """
    require_float(images, "images", _IMAGES)
    if reduction == "batch":
        return row_norms(images.reshape(1, -1)).sum()
    check.one_of(reduction, "reduction", ("mean", "sum", "none", "batch"))
    return reduce(row_norms(images.flatten(1)), reduction)


class BatchNormPrior:
    """Inversion prior that measures the distance of batch statistics from those stored in BatchNorm layers.

        value = sum_l a_l (|mean_l - running_mean_l|_2 + |var_l - running_var_l|_2)

    Here mean_l and var_l (biased) are statistics of the input of layer l over batch and positions. The L2 norms over
    channels are not squared.

    Use it as a context manager. The hooks are removed at the end of the `with` block, even after an exception.

        with BatchNormPrior(network) as prior:
            loss = F.cross_entropy(network(images), labels) + 0.01 * prior.value()

    Args:
        network: network in `eval()` mode, with BatchNorm layers that have running statistics. In training mode every
            forward pass would move the stored statistics toward the synthetic images.
        first_multiplier: a_l of the first layer in the order of `network.modules()` (the paper uses 10 on ImageNet);
            a_l is 1 for the other layers.

    Raises:
        TypeError: not an `nn.Module`.
        ValueError: no such layer, or a multiplier below 0.

    Paper: Yin et al., "Dreaming to Distill" (CVPR 2020), Eq. 4. The authors' code does not remove its hooks from the
    network.
    """

    def __init__(self, network: nn.Module, *, first_multiplier: float = 1.0) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be an nn.Module, got {type(network).__name__}")
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
        """Return the prior of the last forward pass, a scalar that is differentiable in the images.

        Raises:
            RuntimeError: there has been no forward pass inside the `with` block yet.
        """
        if not self._distances:
            raise RuntimeError(
                "no forward pass was recorded: call the network inside `with BatchNormPrior(network) as prior:`"
            )
        return torch.stack(list(self._distances.values())).sum()
