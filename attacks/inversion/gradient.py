"""Reconstruction of images from the gradient of a network, in a single call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from attacks.inversion.reconstruction import Reconstruction, invert_message
from attacks.inversion.updates import Gradient
from distillkit.normalization import IDENTITY, Normalization

__all__ = ["invert_gradient"]


def invert_gradient(
    network: nn.Module,
    gradients: Sequence[Tensor],
    shape: Sequence[int],
    count: int = 1,
    *,
    labels: Tensor | None = None,
    method: str = "geiping",
    steps: int | None = None,
    lr: float | None = None,
    total_variation: float | None = None,
    restarts: int = 1,
    scale: float = 1.0,
    normalization: Normalization = IDENTITY,
    seed: int = 0,
) -> Reconstruction:
    """Reconstruct a batch of images from its gradient, as a server could in federated SGD.

    This is short for `invert_message(Gradient(network, gradients), shape, count, ...)`. The function `invert_message`
    describes the methods, and also accepts priors (functions of the images that are added to the loss).

    Args:
        network: the client's network, with the weights at which the gradient was computed; see `Gradient`.
        gradients: gradient of the mean cross-entropy of the batch, one tensor per parameter.
        shape, count, labels, method, steps, lr, total_variation, restarts, scale, normalization, seed: arguments
            of `invert_message`.

    Returns:
        The reconstructed images and labels. The order of images within a class is arbitrary, so pair them with
        `attacks.match` before you score them.

    Raises:
        TypeError, ValueError: the network does not accept images of this shape, the gradients do not fit the network,
            the labels cannot be inferred, or an option is out of range.
    """
    return invert_message(
        Gradient(network, gradients),
        shape,
        count,
        labels=labels,
        method=method,
        steps=steps,
        lr=lr,
        total_variation=total_variation,
        restarts=restarts,
        scale=scale,
        normalization=normalization,
        seed=seed,
    )
